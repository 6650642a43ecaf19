"""Small but valid ELF and PE files, made byte by byte: no compiler is needed to test what reads, joins and starts programs."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

ELF_MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}
INTERPRETERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}

# A program that prints every argument, then "\1", then every environment variable, each ended by NUL, and exits with 7.
# Registers: the walk over the stack's pointers, and how many lists (arguments, environment) are done.
#   x86_64:  lea 8(%rsp),%rbx; xor %ebp,%ebp
#         1: mov (%rbx),%rsi; add $8,%rbx; test %rsi,%rsi; jz 3f; mov %rsi,%rdi; xor %edx,%edx
#         2: inc %edx; cmpb $0,-1(%rsi,%rdx); jne 2b; call w; jmp 1b
#         3: inc %ebp; cmp $2,%ebp; je 4f; push $1; mov %rsp,%rsi; mov $2,%edx; call w; jmp 1b
#         4: mov $60,%eax; mov $7,%edi; syscall
#         w: mov $1,%edi; mov %edi,%eax; syscall; ret
ECHO_CODE = {
    "x86_64": bytes.fromhex(
        "488d5c240831ed488b334883c3084885f674154889f731d2ffc2807c16ff0075f7e826000000ebdfffc583fd0274116a014889e6ba02000000e80e000000"
        "ebc7b83c000000bf070000000f05bf0100000089f80f05c3"
    ),
    "aarch64": bytes.fromhex(
        "f3230091140080d2618640f8e10000b4020080d22368623842040091c3ffff350e000094f9ffff17940600919f0a00f1e000005423008052e30f1f78e1030091"
        "420080d205000094f0ffff17e00080d2a80b80d2010000d4200080d2080880d2010000d4c0035fd6"
    ),
}
ECHO_EXIT_CODE = 7

# An interpreter that does nothing but what the last step of every one is: it walks over arguments and environment to the auxiliary vector and
# jumps to the program's entry (AT_ENTRY, 9), the stack as it found it.
INTERPRETER_CODE = {
    "x86_64": bytes.fromhex("488d7c2408488b074883c7084885c075f4488b074883c7084885c075f4488b074883c7104883f80975f3ff67f8"),
    "aarch64": bytes.fromhex("e92300912a8540f8eaffffb52a8540f8eaffffb52a2dc1a85f2500f1c1ffff5460011fd6"),
}


def elf(
    machine: str = "x86_64",
    *,
    library: bool = False,
    pie: bool = False,
    needed: Sequence[str] = (),
    imports: Mapping[str, tuple[str, str]] | None = None,
    exports: Sequence[str] = (),
    interpreter: str | None = None,
    code: bytes | None = None,
    padding: bytes = b"",
) -> bytes:
    """A 64-bit little-endian ELF. ``imports`` maps a symbol to (library, version), e.g. ``{"puts": ("libc.so.6", "GLIBC_2.2.5")}``.

    Without ``needed``, ``imports``, ``exports`` and ``interpreter`` a static program that echoes (ECHO_CODE). ``pie`` makes a program that can lie at any address. ``padding`` is put
    inside the loaded segment, to make programs that differ or have a size.
    """
    imports = dict(imports or {})
    code = ECHO_CODE.get(machine, b"\0" * 4) if code is None else code
    dynamic = library or bool(needed or imports or exports)
    if interpreter is None:
        interpreter = INTERPRETERS.get(machine, "/lib/ld.so") if dynamic and not library else ""
    base = 0 if library or pie else 0x400000
    count = 1 + bool(interpreter) + dynamic
    body = bytearray(code)
    start = 64 + 56 * count

    def add(data: bytes, alignment: int = 8) -> int:
        body.extend(bytes(-(start + len(body)) % alignment))
        at = start + len(body)
        body.extend(data)
        return at

    segments = []
    if interpreter:
        at = add(interpreter.encode() + b"\0", 1)
        segments.append((3, 4, at, len(interpreter) + 1))
    if dynamic:
        strings = bytearray(b"\0")

        def string(text: str) -> int:
            at = len(strings)
            strings.extend(text.encode() + b"\0")
            return at

        tags = [(1, string(name)) for name in needed]
        versions: dict[str, dict[str, int]] = {}
        for number, (library_name, version) in enumerate(sorted(set(imports.values())), start=2):
            versions.setdefault(library_name, {})[version] = number
        symbols = bytearray(24)
        versym = bytearray(2)
        for name, (library_name, version) in imports.items():
            symbols += struct.pack("<IBBHQQ", string(name), 0x12, 0, 0, 0, 0)
            versym += struct.pack("<H", versions[library_name][version])
        for name in exports:
            symbols += struct.pack("<IBBHQQ", string(name), 0x12, 0, 1, base + start, 4)
            versym += struct.pack("<H", 1)
        verneed = bytearray()
        for index, (library_name, wanted) in enumerate(versions.items()):
            last = index == len(versions) - 1
            verneed += struct.pack("<HHIII", 1, len(wanted), string(library_name), 16, 0 if last else 16 + 16 * len(wanted))
            for position, (version, number) in enumerate(wanted.items()):
                verneed += struct.pack("<IHHII", _sysv_hash(version), 0, number, string(version), 0 if position == len(wanted) - 1 else 16)
        total = len(symbols) // 24
        # One bucket whose chain holds every symbol: all a loader or reader needs to count them.
        hashes = struct.pack(f"<II I {total}I", 1, total, 1 if total > 1 else 0, *[0, *range(2, total), 0][:total])
        tags += [(4, base + add(hashes)), (5, base + add(bytes(strings))), (6, base + add(bytes(symbols))), (10, len(strings)), (11, 24)]
        if verneed:
            tags += [(0x6FFFFFF0, base + add(bytes(versym))), (0x6FFFFFFE, base + add(bytes(verneed))), (0x6FFFFFFF, len(versions))]
        table = b"".join(struct.pack("<QQ", *tag) for tag in [*tags, (0, 0)])
        segments.append((2, 6, add(table), len(table)))
    body.extend(padding)
    size = start + len(body)
    segments.insert(1 if interpreter else 0, (1, 7, 0, size))
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3 if library or pie else 2, ELF_MACHINES[machine], 1, 0 if library else base + start, 64, 0, 0, 64, 56, count, 64, 0, 0
    )
    table = b"".join(struct.pack("<IIQQQQQQ", kind, flags, at, base + at, base + at, length, length, 0x1000 if kind == 1 else 8) for kind, flags, at, length in segments)
    return header + table + bytes(body)


def loader() -> bytes:
    """What stands for a built loader where it is joined, not started."""
    return (b"\x7fELF" + bytes(1000) + b"opencoti-place\n\0").ljust(8192, b"\0")


def _sysv_hash(name: str) -> int:
    """The hash of the System V gABI, chapter 5, which version records carry."""
    value = 0
    for letter in name.encode():
        value = (value << 4) + letter
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


def pe(
    *,
    machine: int = 0x8664,
    dll: bool = False,
    subsystem: int = 3,
    imports: Mapping[str, Sequence[str]] | None = None,
    exit_code: int = 7,
    text: bytes = b"",
    overlay: bytes = b"",
    certificate: bool = False,
    symbols: bool = False,
    debug: bool = False,
    sections: int = 2,
) -> bytes:
    """A PE32+ image that ends with ``exit_code`` (its entry point returns it, which ends the only thread).

    ``text`` is put behind the code, e.g. a version string. ``sections`` of 2 are ``.text`` and ``.rdata``; more are empty ones.
    """
    imports = {"KERNEL32.dll": ["ExitProcess"]} if imports is None else imports
    alignment, page = 0x200, 0x1000
    code = b"\xb8" + struct.pack("<I", exit_code) + b"\xc3" + text
    code_room = -(-len(code) // alignment) * alignment
    rdata_address = 0x1000 + -(-len(code) // page) * page
    rdata = bytearray(20 * (len(imports) + 1))
    for index, (name, functions) in enumerate(imports.items()):
        hints = []
        for function in functions:
            hints.append(rdata_address + len(rdata))
            rdata += b"\0\0" + function.encode() + b"\0" + (b"\0" if len(function) % 2 == 0 else b"")
        name_at = rdata_address + len(rdata)
        rdata += name.encode() + b"\0"
        rdata += bytes(-len(rdata) % 8)
        table = struct.pack(f"<{len(hints) + 1}Q", *hints, 0)
        lookup, addresses = rdata_address + len(rdata), rdata_address + len(rdata) + len(table)
        rdata += table + table
        struct.pack_into("<5I", rdata, 20 * index, lookup, 0, 0, name_at, addresses)
    headers = -(-(0x80 + 24 + 240 + 40 * sections) // alignment) * alignment
    debug_at = 0
    if debug:
        rdata += bytes(-len(rdata) % 4)
        debug_at = rdata_address + len(rdata)
        raw = headers + code_room + len(rdata) + 28
        record = b"RSDS" + bytes(range(16)) + struct.pack("<I", 1) + b"x.pdb\0"
        rdata += struct.pack("<IIHHIIII", 0, 0, 0, 0, 2, len(record), debug_at + 28, raw) + record
    rdata_room = -(-len(rdata) // alignment) * alignment
    end = headers + code_room + rdata_room
    directories = [(0, 0)] * 16
    if imports:
        directories[1] = (rdata_address, 20 * (len(imports) + 1))
    if debug:
        directories[6] = (debug_at, 28)
    if certificate:
        directories[4] = (end, 16)
        overlay = struct.pack("<IHH", 16, 0x0200, 2) + b"\x30\x06\x01\x01\xff\x01\x01\xff"
    dos = bytearray(0x80)
    dos[:2] = b"MZ"
    struct.pack_into("<I", dos, 0x3C, 0x80)
    coff = struct.pack("<4sHHIIIHH", b"PE\0\0", machine, sections, 0, end if symbols else 0, 1 if symbols else 0, 240, 0x2022 if dll else 0x0022)
    last_address = rdata_address + -(-len(rdata) // page) * page
    image = last_address + page * (sections - 2)
    optional = struct.pack(
        "<HBBIIIII QIIHHHHHHIIIIHHQQQQII",
        0x20B, 14, 0, code_room, rdata_room, 0, 0x1000, 0x1000,
        0x140000000, page, alignment, 6, 0, 0, 0, 6, 0, 0, image, headers, 0x1234, subsystem, 0x8100,
        0x100000, 0x1000, 0x100000, 0x1000, 0, 16,
    ) + b"".join(struct.pack("<II", *pair) for pair in directories)  # fmt: skip
    table = struct.pack("<8sIIIIIIHHI", b".text", len(code), 0x1000, code_room, headers, 0, 0, 0, 0, 0x60000020)
    table += struct.pack("<8sIIIIIIHHI", b".rdata", len(rdata), rdata_address, rdata_room, headers + code_room, 0, 0, 0, 0, 0xC0000040)
    for number in range(sections - 2):
        table += struct.pack("<8sIIIIIIHHI", b".bss%d" % number, page, last_address + page * number, 0, 0, 0, 0, 0, 0, 0xC0000080)
    head = bytes(dos) + coff + optional + table
    return head.ljust(headers, b"\0") + code.ljust(code_room, b"\0") + bytes(rdata).ljust(rdata_room, b"\0") + overlay
