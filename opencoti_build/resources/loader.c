// The loader of a universal file: becomes the program that lies in the file, without copying it.
//
// A start of the universal file (launcher.sh) executes a copy of this loader in the user's cache instead of a copy of the program. It maps the
// program's segments straight out of the file, maps the program's interpreter (ld.so) as the kernel would, corrects the auxiliary vector and jumps
// to the interpreter, which sees what the kernel would have given it.
//
// Which program that is stands in `place`; loader.py fills it in, finding it by its first bytes. So the loader needs no arguments
// of its own, and a program that starts /proc/self/exe again gets this loader, thus itself. Where the file lies is in OPENCOTI_SELF.
//
// On the first start it lies in a scratch folder, "new." and more, and finishes the installation: fixes its time, checks itself and the program,
// writes the stamp that later starts look for (see launcher.sh) and takes the name in OPENCOTI_SELF_EXE.
//
// What cannot be mapped here (a file on a noexec mount, say) is started the other way: `/bin/sh FILE arguments`, with
// OPENCOTI_LLAMAFILE_COPY=again, upon which the launcher copies. Where that variable is set already, copying did not help.
//
// No C library, no start files, no relocations, nothing writable but the stack; one segment (loader.py sees to that). Sources: System V ABI
// with its AMD64 and AArch64 supplements; Linux: elf(5), getauxval(3), syscalls(2).

typedef unsigned char      u8;
typedef unsigned short     u16;
typedef unsigned int       u32;
typedef unsigned long      u64;

#define NAME "opencoti-llamafile"

// ---- what loader.py fills in ----

struct place {
    char magic[16];
    u64  offset; // of the program in the file
    u64  size;
    u32  crc32;  // of the program, as in its ZIP entry
    u32  head;   // the same of its first HEAD bytes
    u32  own;    // of this loader up to its own end, these four bytes taken as zero
    u32  length; // of this loader
};

#define HEAD 4096ul

__attribute__((used, section(".rodata.place"))) static const volatile struct place place = { .magic = "opencoti-place\n" };

// ---- the system ----

#if defined(__x86_64__)
#    define MACHINE      62
#    define SYSTEM       "Linux x86_64"
#    define SYS_read     0
#    define SYS_write    1
#    define SYS_close    3
#    define SYS_fstat    5
#    define SYS_mmap     9
#    define SYS_munmap   11
#    define SYS_pread    17
#    define SYS_execve   59
#    define SYS_fchmod   91
#    define SYS_exit     231
#    define SYS_openat   257
#    define SYS_mkdirat  258
#    define SYS_unlinkat 263
#    define SYS_utimens  280
#    define SYS_rename   316
#    define O_DIRECTORY  0200000
#    define O_NOFOLLOW   0400000

static long call6(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8")   = e;
    register long r9 __asm__("r9")   = f;
    long          result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return result;
}

__asm__(".globl _start\n"
        "_start:\n"
        "    xorl %ebp, %ebp\n"
        "    movq %rsp, %rdi\n"
        "    andq $-16, %rsp\n"
        "    call run\n"
        "    hlt\n");

// rdx: a function to be called at exit; the kernel gives none.
__attribute__((noreturn)) static void enter(u64 entry, u64 * stack) {
    __asm__ volatile("movq %1, %%rsp\n xorl %%edx, %%edx\n xorl %%ebp, %%ebp\n jmp *%0" : : "a"(entry), "c"(stack) : "memory");
    __builtin_unreachable();
}

struct status {
    u64 device, inode, links;
    u32 mode, user, group, pad;
    u64 special;
    long size;
    u64 rest[11];
};
#elif defined(__aarch64__)
#    define MACHINE      183
#    define SYSTEM       "Linux aarch64"
#    define SYS_mkdirat  34
#    define SYS_unlinkat 35
#    define SYS_fchmod   52
#    define SYS_openat   56
#    define SYS_close    57
#    define SYS_read     63
#    define SYS_write    64
#    define SYS_pread    67
#    define SYS_fstat    80
#    define SYS_utimens  88
#    define SYS_exit     94
#    define SYS_munmap   215
#    define SYS_execve   221
#    define SYS_mmap     222
#    define SYS_rename   276
#    define O_DIRECTORY  040000
#    define O_NOFOLLOW   0100000

static long call6(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}

__asm__(".globl _start\n"
        "_start:\n"
        "    mov x29, 0\n"
        "    mov x30, 0\n"
        "    mov x0, sp\n"
        "    b run\n");

__attribute__((noreturn)) static void enter(u64 entry, u64 * stack) {
    __asm__ volatile("mov sp, %1\n mov x0, 0\n mov x29, 0\n mov x30, 0\n br %0" : : "r"(entry), "r"(stack) : "memory", "x0");
    __builtin_unreachable();
}

struct status {
    u64 device, inode;
    u32 mode, links, user, group;
    u64 special, pad;
    long size;
    u64 rest[9];
};
#else
#    error no such machine
#endif

#define CALL(n, a, b, c)        call6(n, (long) (a), (long) (b), (long) (c), 0, 0, 0)
#define CALL4(n, a, b, c, d)    call6(n, (long) (a), (long) (b), (long) (c), (long) (d), 0, 0)
#define CALL6(n, a, b, c, d, e) call6(n, (long) (a), (long) (b), (long) (c), (long) (d), (long) (e), 0)

#define HERE      (-100) // AT_FDCWD
#define O_READ    02004000 // O_RDONLY, with O_CLOEXEC and, so that a pipe cannot hold us up, O_NONBLOCK
#define O_NEW     02000301 // O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC
#define S_KIND    0170000
#define S_FILE    0100000
#define S_FOLDER  0040000

enum { READ = 1, WRITE = 2, EXECUTE = 4 };
enum { SHARED = 1, PRIVATE = 2, FIXED = 0x10, ANONYMOUS = 0x20, NORESERVE = 0x4000, POPULATE = 0x8000 };

static long map(u64 at, u64 size, int rights, int flags, int file, u64 offset) {
    return call6(SYS_mmap, at, size, rights, flags, file, offset);
}

static int failed(long result) {
    return (u64) result > -4096ul;
}

// ---- memory and text; the compiler may call the first two ----

void * memset(void * at, int value, u64 size) {
    for (u64 i = 0; i < size; i++) {
        ((volatile u8 *) at)[i] = value;
    }
    return at;
}

void * memcpy(void * to, const void * from, u64 size) {
    for (u64 i = 0; i < size; i++) {
        ((volatile u8 *) to)[i] = ((const u8 *) from)[i];
    }
    return to;
}

static u64 length(const char * text) {
    u64 n = 0;
    while (text[n]) {
        n++;
    }
    return n;
}

// The rest of `text` if it begins with `start`.
static const char * after(const char * text, const char * start) {
    while (*start) {
        if (*text++ != *start++) {
            return 0;
        }
    }
    return text;
}

static void say(const char * text) {
    CALL(SYS_write, 2, text, length(text));
}

// ---- CRC-32, as ZIP has it ----

struct table {
    u32 of[8][256];
};

static void make_table(struct table * table) {
    for (u32 i = 0; i < 256; i++) {
        u32 value = i;
        for (int bit = 0; bit < 8; bit++) {
            value = value & 1 ? value >> 1 ^ 0xedb88320 : value >> 1;
        }
        table->of[0][i] = value;
    }
    for (int far = 1; far < 8; far++) {
        for (u32 i = 0; i < 256; i++) {
            const u32 near     = table->of[far - 1][i];
            table->of[far][i] = near >> 8 ^ table->of[0][near & 255];
        }
    }
}

static u32 crc_plain(const struct table * table, u32 value, const u8 * at, u64 size) {
    for (; size >= 8; at += 8, size -= 8) {
        u64 word = *(const u64 *) at ^ value;
        value    = 0;
        for (int i = 7; i >= 0; i--, word >>= 8) {
            value ^= table->of[i][word & 255];
        }
    }
    for (; size; size--) {
        value = value >> 8 ^ table->of[0][(value ^ *at++) & 255];
    }
    return value;
}

#if defined(__x86_64__)
#    include <cpuid.h>
#    include <wmmintrin.h>

// Carry-less multiplication, 64 bytes a turn. A block of 16 bytes that lies D bits ahead of another is worth the same, modulo the polynomial, as its
// halves times x^(D+64) and x^D added to the other; with the bits of a byte turned around, as here, the factors are the remainders of
// x^(D+32) and x^(D-32), turned around in 33 bits. tests/engine/test_mapping.py derives the four numbers.
__attribute__((target("pclmul"))) static u32 crc_fast(const struct table * table, u32 value, const u8 * at, u64 size) {
    if (size < 128) {
        return crc_plain(table, value, at, size);
    }
    const __m128i   far  = _mm_set_epi64x(0x1c6e41596, 0x154442bd4); // D = 512
    const __m128i   near = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0); // D = 128
    const __m128i * from = (const __m128i *) at;
    __m128i         a    = _mm_xor_si128(_mm_loadu_si128(from), _mm_cvtsi32_si128(value));
    __m128i         b    = _mm_loadu_si128(from + 1);
    __m128i         c    = _mm_loadu_si128(from + 2);
    __m128i         d    = _mm_loadu_si128(from + 3);
#    define FOLD(x, by, to) _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), to)
    for (from += 4, size -= 64; size >= 64; from += 4, size -= 64) {
        // The processor's own look-ahead ends at every page.
        _mm_prefetch((const char *) from + 8192, _MM_HINT_T0);
        a = FOLD(a, far, _mm_loadu_si128(from));
        b = FOLD(b, far, _mm_loadu_si128(from + 1));
        c = FOLD(c, far, _mm_loadu_si128(from + 2));
        d = FOLD(d, far, _mm_loadu_si128(from + 3));
    }
    a = FOLD(FOLD(FOLD(a, near, b), near, c), near, d);
    u8 rest[16];
    _mm_storeu_si128((__m128i *) rest, a);
    return crc_plain(table, crc_plain(table, 0, rest, 16), (const u8 *) from, size);
}

static int is_fast(u64 capabilities) {
    u32 a, b, c, d;
    (void) capabilities;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_PCLMUL;
}
#else
__attribute__((target("crc"))) static u32 crc_fast(const struct table * table, u32 value, const u8 * at, u64 size) {
    for (; size >= 8; at += 8, size -= 8) {
        value = __builtin_arm_crc32d(value, *(const u64 *) at);
    }
    return crc_plain(table, value, at, size);
}

static int is_fast(u64 capabilities) {
    return capabilities >> 7 & 1; // HWCAP_CRC32
}
#endif

// ---- ELF ----

struct header {
    u8  ident[16];
    u16 type, machine;
    u32 version;
    u64 entry, programs, sections;
    u32 flags;
    u16 size, program_size, program_count, section_size, section_count, section_names;
};

struct segment {
    u32 type, rights;
    u64 offset, address, physical, file_size, size, alignment;
};

enum { LOAD = 1, INTERPRETER = 3 };

// The first bytes of an ELF file.
union head {
    struct header header;
    u8            bytes[HEAD];
};

static const struct segment * segments(const union head * head) {
    return (const struct segment *) (head->bytes + head->header.programs);
}

// A position-independent 64-bit program or library for this machine, the table of its segments within the first HEAD bytes.
static int is_sane(const union head * head, u64 got) {
    const struct header * h = &head->header;
    return got >= sizeof *h && *(const u32 *) h->ident == 0x464c457f && h->ident[4] == 2 && h->ident[5] == 1 && h->type == 3 && h->machine == MACHINE &&
           h->program_size == sizeof(struct segment) && h->programs % 8 == 0 && h->programs <= got && h->program_count <= (got - h->programs) / sizeof(struct segment);
}

// Maps what `head` describes, which begins at `base` of `file` and is `size` bytes long. Returns the distance between the addresses in it and those
// where it is, 0 if the system refuses or it is not mappable at this page size.
static u64 map_segments(int file, u64 base, u64 size, const union head * head, u64 page) {
    const struct segment * s     = segments(head);
    const struct segment * end   = s + head->header.program_count;
    u64                    first = ~0ul, last = 0, alignment = page;
    for (const struct segment * p = s; p < end; p++) {
        if (p->type != LOAD) {
            continue;
        }
        // Sizes first, so that no sum below can overflow.
        if (p->offset > size || p->file_size > size - p->offset || p->file_size > p->size || p->size >> 46 || p->address >> 46 ||
            (p->address - p->offset - base) & (page - 1)) {
            return 0;
        }
        first     = p->address < first ? p->address : first;
        last      = p->address + p->size > last ? p->address + p->size : last;
        alignment = p->alignment > alignment && p->alignment <= 1ul << 30 ? p->alignment : alignment;
    }
    if (first >= last || alignment & (alignment - 1)) {
        return 0;
    }
    first &= -alignment;
    const u64 span = ((last - first) + page - 1) & -page;
    const u64 more = alignment - page;
    const long got = map(0, span + more, 0, PRIVATE | ANONYMOUS | NORESERVE, -1, 0);
    if (failed(got)) {
        return 0;
    }
    const u64 start = (got + alignment - 1) & -alignment;
    if (start > (u64) got) {
        CALL(SYS_munmap, got, start - got, 0);
    }
    if (got + more > start) {
        CALL(SYS_munmap, start + span, got + more - start, 0);
    }
    const u64 move = start - first;
    for (const struct segment * p = s; p < end; p++) {
        if (p->type != LOAD || !p->size) {
            continue;
        }
        const int rights  = (p->rights & 4 ? READ : 0) | (p->rights & 2 ? WRITE : 0) | (p->rights & 1 ? EXECUTE : 0);
        const u64 slack   = p->address & (page - 1);
        const u64 from    = p->address + move - slack;
        const u64 stored  = p->address + move + p->file_size;
        const u64 backed  = p->file_size ? (stored + page - 1) & -page : from;
        const u64 to      = (p->address + move + p->size + page - 1) & -page;
        if (backed > from && failed(map(from, backed - from, rights, PRIVATE | FIXED, file, base + p->offset - slack))) {
            return 0;
        }
        // What follows the stored bytes is zero: the rest of their last page, and whole pages. Nothing reads behind a segment that cannot be written.
        if (p->size > p->file_size && rights & WRITE && backed > stored && p->file_size) {
            u8 * rest = (u8 *) stored;
            for (u64 n = backed - stored; n; n--) {
                *(volatile u8 *) rest++ = 0;
            }
        }
        if (to > backed && failed(map(backed, to - backed, rights, PRIVATE | FIXED | ANONYMOUS, -1, 0))) {
            return 0;
        }
    }
    return move;
}

// ---- the start ----

enum { AT_NULL, AT_PHDR = 3, AT_PHENT, AT_PHNUM, AT_PAGESZ, AT_BASE, AT_ENTRY = 9, AT_EUID = 12, AT_HWCAP = 16, AT_EXECFN = 31 };

struct start {
    char **      arguments;
    char **      environment;
    u64 *        vector; // auxiliary: pairs of a name and a value
    const char * file;
    const char * target;  // the name in the cache
    const char * tried;   // OPENCOTI_LLAMAFILE_COPY
    char *       scratch; // on a first start, where this loader lies now, with room for ".ok"; else null
    u64          scratch_length;
};

static u64 * auxiliary(const struct start * start, u64 name) {
    u64 * pair = start->vector;
    while (*pair != AT_NULL && *pair != name) {
        pair += 2;
    }
    return pair + 1;
}

// The names that this loader and its stamp have in the scratch folder; one piece of memory holds both, one at a time.
static const char * scratch_stamp(struct start * start) {
    memcpy(start->scratch + start->scratch_length, ".ok", 4);
    return start->scratch;
}

static const char * scratch_loader(struct start * start) {
    start->scratch[start->scratch_length] = 0;
    return start->scratch;
}

// The scratch folder goes with what is still in it.
static void clean(struct start * start) {
    if (!start->scratch) {
        return;
    }
    CALL(SYS_unlinkat, HERE, scratch_stamp(start), 0);
    CALL(SYS_unlinkat, HERE, scratch_loader(start), 0);
    char * end = start->scratch + start->scratch_length;
    while (*--end != '/') {
    }
    *end = 0;
    CALL(SYS_unlinkat, HERE, start->scratch, 0x200); // AT_REMOVEDIR
    start->scratch = 0;
}

__attribute__((noreturn)) static void stop(struct start * start, const char * before, const char * behind) {
    clean(start);
    say(NAME ": ");
    say(before);
    say(start->file ? start->file : "");
    say(behind);
    for (;;) {
        CALL(SYS_exit, 126, 0, 0);
    }
}

__attribute__((noreturn)) static void stop_damaged(struct start * start, const char * how) {
    stop(start, "the program for " SYSTEM " inside ", how);
}

// Let the launcher start a copy of the program.
__attribute__((noreturn)) static void start_copy(struct start * start, int file) {
    char magic[12];
    if (CALL4(SYS_pread, file, magic, 12, 0) != 12 || !after(magic, "MZopencoti='")) {
        stop(start, "OPENCOTI_SELF is not an opencoti-llamafile: ", "\n");
    }
    if (start->tried) {
        stop(start, "cannot map the program inside ", ", and copying it was tried: unset OPENCOTI_LLAMAFILE_COPY\n");
    }
    clean(start);
    u64 arguments = 0, variables = 0;
    while (start->arguments[arguments]) {
        arguments++;
    }
    while (start->environment[variables]) {
        variables++;
    }
    const char * words[arguments + 3];
    const char * environment[variables + 2];
    const char * wish = "OPENCOTI_LLAMAFILE_COPY=again";
    words[0] = "sh";
    words[1] = start->file;
    for (u64 i = 1; i < arguments; i++) {
        words[i + 1] = start->arguments[i];
    }
    words[arguments ? arguments + 1 : 2] = 0;
    for (u64 i = 0; i < variables; i++) {
        // A variable that says no would hide ours.
        const int ours = after(start->environment[i], "OPENCOTI_LLAMAFILE_COPY=") != 0;
        environment[i] = ours ? wish : start->environment[i];
    }
    environment[variables]     = wish;
    environment[variables + 1] = 0;
    CALL(SYS_execve, "/bin/sh", words, environment);
    stop(start, "cannot map the program inside ", ", and there is no /bin/sh to copy it\n");
}

// The stamp, as launcher.sh writes it.
static int write_stamp(struct start * start) {
    char       text[64] = "ok ";
    long       size     = 0;
    const long id       = CALL4(SYS_openat, HERE, "/proc/sys/kernel/random/boot_id", O_READ, 0);
    if (!failed(id)) {
        size = CALL(SYS_read, id, text + 3, sizeof text - 4);
        CALL(SYS_close, id, 0, 0);
    }
    size = size > 0 && text[size + 2] == '\n' ? size + 3 : 3;
    if (size == 3) {
        text[size++] = '\n';
    }
    const long file = CALL4(SYS_openat, HERE, scratch_stamp(start), O_NEW, 0600);
    if (failed(file)) {
        return 0;
    }
    const long wrote = CALL(SYS_write, file, text, size);
    CALL(SYS_close, file, 0, 0);
    return wrote == size;
}

// The fixed time, before anything is checked: so a later write shows. 1980-01-01, as in launcher.sh.
static int set_time(const char * path) {
    static const long times[4] = { 315532800, 0, 315532800, 0 };
    return !CALL4(SYS_utimens, HERE, path, times, 0);
}

typedef u32 checksum(const struct table *, u32, const u8 *, u64);

// This loader as it lies in memory, which is its file's own pages.
static int is_whole(const struct table * table, checksum * crc, const u8 * me) {
    const u64 own = (const u8 *) &place.own - me;
    u32       sum = crc(table, ~0u, me, own);
    sum           = crc_plain(table, sum, (const u8 *) "\0\0\0", 4);
    return (crc(table, sum, me + own + 4, place.length - own - 4) ^ ~0u) == place.own;
}

extern const u8 __ehdr_start[] __attribute__((visibility("hidden")));

// A folder of this user that nobody else can write to; it becomes one that nobody else can read either. `mend`: so does one that others could write to.
static int is_private(struct start * start, const char * path, int mend) {
    struct status status;
    const long    folder = CALL4(SYS_openat, HERE, path, O_READ | O_DIRECTORY | O_NOFOLLOW, 0);
    if (failed(folder)) {
        return 0;
    }
    int good = !CALL(SYS_fstat, folder, &status, 0) && (status.mode & S_KIND) == S_FOLDER && status.user == *auxiliary(start, AT_EUID);
    good     = good && (mend || !(status.mode & 022));
    if (good && status.mode & 077) {
        good = !CALL(SYS_fchmod, folder, 0700, 0);
    }
    CALL(SYS_close, folder, 0, 0);
    return good;
}

// Whether the name in the cache is a loader like this one already, by another first start or before a reboot.
static int is_installed(struct start * start) {
    struct status status;
    const long    file = CALL4(SYS_openat, HERE, start->target, O_READ | O_NOFOLLOW, 0);
    if (failed(file)) {
        return 0;
    }
    const u64 size = place.length;
    int       same = !CALL(SYS_fstat, file, &status, 0) && (status.mode & (S_KIND | 0122)) == (S_FILE | 0100) && (u64) status.size == size &&
               status.user == *auxiliary(start, AT_EUID) && set_time(start->target);
    const long there = same ? map(0, size, READ, SHARED, file, 0) : -1;
    if (!failed(there)) {
        for (u64 i = 0; i < size; i++) {
            same &= ((const u8 *) there)[i] == __ehdr_start[i];
        }
        CALL(SYS_munmap, there, size, 0);
    }
    CALL(SYS_close, file, 0, 0);
    return same && !failed(there);
}

// Gives this loader and its stamp their final names. Returns 0 where that cannot be done.
static int install(struct start * start) {
    const u64 size = length(start->target);
    char      name[size + 4];
    memcpy(name, start->target, size + 1);
    u64 slash[2], end = size;
    for (int i = 0; i < 2; i++) {
        while (end && name[--end] != '/') {
        }
        slash[i] = end;
    }
    if (!slash[1]) {
        return 0;
    }
    name[slash[1]] = 0;
    if (!is_private(start, name, 0)) {
        return 0;
    }
    name[slash[1]] = '/';
    name[slash[0]] = 0;
    CALL(SYS_mkdirat, HERE, name, 0700);
    // Where the user's group may write to new folders, the launcher has made such a one.
    if (!is_private(start, name, 1)) {
        return 0;
    }
    name[slash[0]] = '/';
    memcpy(name + size, ".ok", 4);
    int theirs = is_installed(start);
    if (!theirs && CALL6(SYS_rename, HERE, scratch_loader(start), HERE, start->target, 1)) { // RENAME_NOREPLACE
        theirs = is_installed(start);
        if (!theirs && CALL6(SYS_rename, HERE, scratch_loader(start), HERE, start->target, 0)) {
            return 0;
        }
    }
    // The loader first: a stamp without it says nothing.
    CALL6(SYS_rename, HERE, scratch_stamp(start), HERE, name, 0);
    clean(start);
    start->arguments[0] = (char *) start->target;
    if (theirs) {
        // A program must not run from a file without a name: it looks at OPENCOTI_SELF_EXE to see whether it is the one that was started.
        CALL(SYS_execve, start->target, start->arguments, start->environment);
        return 0;
    }
    // What the program sees of its own name is the name it has now.
    *auxiliary(start, AT_EXECFN) = (u64) start->target;
    return 1;
}

// What the launcher tells through the environment, and where the auxiliary vector begins.
static void read_environment(struct start * start) {
    char ** variable = start->environment;
    for (; *variable; variable++) {
        const char * value;
        if ((value = after(*variable, "OPENCOTI_SELF="))) {
            start->file = value;
        } else if ((value = after(*variable, "OPENCOTI_SELF_EXE="))) {
            start->target = value;
        } else if ((value = after(*variable, "OPENCOTI_LLAMAFILE_COPY=")) && *value && *value != '0') {
            start->tried = value;
        }
    }
    start->vector = (u64 *) (variable + 1);
}

// Whether the file `name`, `size` bytes long, lies in a scratch folder: then this is a first start.
static int is_scratch(const char * name, u64 size) {
    for (int slashes = 0; size; size--) {
        if (name[size - 1] == '/' && ++slashes == 2) {
            break;
        }
    }
    return after(name + size, "new.") != 0;
}

// On a first start: the stamp, and a look at every byte of this loader and of the program.
static void check(struct start * start, int file, u64 size, const struct table * table, checksum * crc) {
    if (!set_time(scratch_loader(start)) || !write_stamp(start) || !set_time(scratch_stamp(start))) {
        start_copy(start, file);
    }
    if (!is_whole(table, crc, __ehdr_start)) {
        stop(start, "the loader inside ", " has the wrong checksum: the file is damaged, download it again\n");
    }
    if (size < place.offset + place.size) {
        stop_damaged(start, " is cut off: the file is damaged, download it again\n");
    }
    const long all = map(0, place.size, READ, SHARED | POPULATE, file, place.offset);
    if (failed(all)) {
        start_copy(start, file);
    }
    if ((crc(table, ~0u, (const u8 *) all, place.size) ^ ~0u) != place.crc32) {
        stop_damaged(start, " has the wrong checksum: the file is damaged, download it again\n");
    }
    CALL(SYS_munmap, all, place.size, 0);
}

// The path of the interpreter; null where there is none in the first bytes.
static const char * interpreter_of(const union head * head) {
    const struct segment * s = segments(head);
    for (u64 i = 0; i < head->header.program_count; i++) {
        if (s[i].type == INTERPRETER && s[i].offset < HEAD && s[i].file_size && s[i].file_size <= HEAD - s[i].offset && !head->bytes[s[i].offset + s[i].file_size - 1]) {
            return (const char *) head->bytes + s[i].offset;
        }
    }
    return 0;
}

// Where the table of segments is in memory.
static u64 table_address(const union head * head, u64 move) {
    const struct segment * s  = segments(head);
    const u64              at = head->header.programs;
    for (u64 i = 0; i < head->header.program_count; i++) {
        if (s[i].type == LOAD && s[i].offset <= at && at < s[i].offset + s[i].file_size) {
            return move + s[i].address + at - s[i].offset;
        }
    }
    return 0;
}

__attribute__((noreturn, used, visibility("hidden"))) void run(u64 * stack) {
    struct start start = { 0 };
    start.arguments    = (char **) (stack + 1);
    start.environment  = start.arguments + stack[0] + 1;
    read_environment(&start);
    if (!start.file || *start.file != '/') {
        stop(&start, "this is only the loader, and OPENCOTI_SELF does not name the file it belongs to: start that file. ", "\n");
    }
    const long file = CALL4(SYS_openat, HERE, start.file, O_READ, 0);
    if (failed(file)) {
        stop(&start, "cannot open ", "\n");
    }
    const char * name = (const char *) *auxiliary(&start, AT_EXECFN);
    const u64    size = name ? length(name) : 0;
    char         scratch[size + 4];
    if (size && start.target && is_scratch(name, size)) {
        memcpy(scratch, name, size + 1);
        start.scratch        = scratch;
        start.scratch_length = size;
    }
    struct status status;
    if (CALL(SYS_fstat, file, &status, 0) || (status.mode & S_KIND) != S_FILE) {
        start_copy(&start, file);
    }
    union head   head, other;
    struct table table;
    make_table(&table);
    checksum * crc = is_fast(*auxiliary(&start, AT_HWCAP)) ? crc_fast : crc_plain;
    const long got = CALL4(SYS_pread, file, &head, HEAD, place.offset);
    if (start.scratch) {
        check(&start, file, status.size, &table, crc);
    }
    // Another release may have taken the file's name, or it may have been cut off.
    const char * path = 0;
    if (got == HEAD && (u64) status.size >= place.offset + place.size && (crc(&table, ~0u, head.bytes, HEAD) ^ ~0u) == place.head && is_sane(&head, got)) {
        path = interpreter_of(&head);
    }
    const long interpreter = path ? CALL4(SYS_openat, HERE, path, O_READ, 0) : -1;
    const long more        = failed(interpreter) ? -1 : CALL4(SYS_pread, interpreter, &other, HEAD, 0);
    if (failed(more) || !is_sane(&other, more)) {
        start_copy(&start, file);
    }
    const u64 page    = *auxiliary(&start, AT_PAGESZ) ? *auxiliary(&start, AT_PAGESZ) : 4096;
    const u64 program = map_segments(file, place.offset, place.size, &head, page);
    const u64 base    = program ? map_segments(interpreter, 0, 1ul << 40, &other, page) : 0;
    if (!base || (start.scratch && !install(&start))) {
        start_copy(&start, file);
    }
    CALL(SYS_close, interpreter, 0, 0);
    CALL(SYS_close, file, 0, 0);
    *auxiliary(&start, AT_PHDR)  = table_address(&head, program);
    *auxiliary(&start, AT_PHENT) = head.header.program_size;
    *auxiliary(&start, AT_PHNUM) = head.header.program_count;
    *auxiliary(&start, AT_BASE)  = base;
    *auxiliary(&start, AT_ENTRY) = program + head.header.entry;
    enter(base + other.header.entry, stack);
}
