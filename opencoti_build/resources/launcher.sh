# The shell side of a universal file. Two stages, cut at the marker line:
#
#   stage 1 lies between the DOS header and the PE header, some three KiB at most; it finds what is known to be good in the cache
#           and becomes it. This is every start but the first. On the first start it extracts the loader (resources/loader.c),
#           a few KiB that check and map the program where it lies, and becomes that.
#   stage 2 is the ZIP member bin/launcher.sh, read only when stage 1 cannot do that; it extracts the program, checks, explains.
#
# So what lies in the cache, under one name, is a loader or a program; the size tells.
#
# Runs in dash, bash, busybox ash, zsh and mksh: POSIX, plus [ -O ], [ -nt ] and [ -ot ], which all of them have. (ksh93 refuses any script with a
# NUL byte in its first block, so it needs the words "sh FILE".)
# Comment lines, indentation and empty lines are removed when a file is joined; @NAMES@ are filled in. Variables start with an
# underscore so that none of the caller's exported ones is changed on the way to the program.
#
# An extracted program is taken without reading it when its size is right and it has the time of the stamp beside it. Both
# got the same fixed time when the program's bytes were checked, so any later write, truncation or replacement shows. The stamp
# holds the kernel's boot id: after a reboot, thus also after a power cut that lost data blocks, the bytes are checked once more.

# _p: absolute path of this file. A shell that found it through PATH may leave a bare name in $0; the first line tells our
# file from another of the same name in the current folder.
_p=$0
case $_p in
*/*) ;;
*)
  _x=
  { IFS= read -r _x <"./$_p"; } 2>/dev/null
  case $_x in
  @MAGIC@*) _p=./$_p;;
  *) _p=$(command -v -- "$_p") || _p=./$0;;
  esac;;
esac
case $_p in
/*) ;;
*) _p=${PWD%/}/${_p#./};;
esac
[ ! -L "$_p" ] || { _x=$(readlink -f "$_p") && [ -f "$_x" ] && _p=$_x; }
# _z: the caller's PATH; ours also has the standard folders, so that an odd PATH does not cost us uname.
_z=${PATH-}
PATH=${PATH:+$PATH:}/usr/bin:/bin
# _o, _s: offset (in units of 64 KiB) and size of the program for this system; _k, _h: its cksum and sha256; _l, _y: offset (in
# units of 4 KiB) of its loader and the loader's cksum; _i: the interpreter it needs.
oc_arm() {
  _o= _l= _y= _i=
  case $_m in
@CASES@
  esac
  [ "$_o" ] && { [ -z "$_i" ] || [ -e "$_i" ]; }
}
_e=opencoti-llamafile
# The kernel's own names cost no process. They are not those of this system where it is emulated, or has 32 bits.
_m=
{ read -r _m </proc/sys/kernel/ostype && read -r _x </proc/sys/kernel/arch && _m="$_m $_x"; } 2>/dev/null
oc_arm || { _m=$(uname -sm); oc_arm; } || _l=
case $_o$_m in
CYGWIN*|MINGW*|MSYS*) PATH=$_z; exec "$_p" "$@";;
[0-9]*) ;;
*) printf '%s\n' "$_e: no program for $_m in this file; it has: @SYSTEMS@" >&2; exit 126;;
esac
# _a: size of the loader, where one may be used.
_a=$_s
case ${OPENCOTI_LLAMAFILE_COPY-} in
''|0) [ -z "$_l" ] || _a=@LOADER@;;
again) unset OPENCOTI_LLAMAFILE_COPY;;
esac
_u=${EUID-}
[ "$_u" ] || { while read -r _x _t _j _w; do case $_x in Uid:) _u=$_j; break;; esac; done </proc/self/status; } 2>/dev/null
[ "$_u" ] || _u=$(id -u)
_b=
{ read -r _b </proc/sys/kernel/random/boot_id; } 2>/dev/null
# Calls $1 for every folder that may hold our cache, best first, until it returns 0. _d: our private folder there; _f: the
# program. A program elsewhere is not looked for while the folder that the user named might still get one.
oc_each() {
  for _c in "${OPENCOTI_LLAMAFILE_CACHE-}" "${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}" "${TMPDIR:-/tmp}" /var/tmp "/run/user/$_u" /dev/shm "${_p%/*}/.llamafile"; do
    case $_c in
    /*)
      _d=${_c%/}/$_e-$_u; _f=$_d/$_h/$_e
      "$1" && return
      [ "$1$_c" != "oc_quick${OPENCOTI_LLAMAFILE_CACHE-}" ] || return;;
    esac
  done
  return 1
}
# A private folder and in it a loader or program that was checked since the last boot.
oc_quick() {
  [ -O "$_d" ] && [ ! -L "$_d" ] && [ -O "$_f" ] && [ ! -L "$_f" ] && [ -x "$_f" ] || return 1
  _x=
  { read -r _x <"$_f.ok"; } 2>/dev/null
  [ "$_x" = "ok $_b" ] && [ ! "$_f" -nt "$_f.ok" ] && [ ! "$_f" -ot "$_f.ok" ] || return 1
  [ "$(find "$_d" "$_f" -prune \( -type d ! -perm -20 ! -perm -2 -o -type f \( -size ${_s}c -o -size ${_a}c \) \))" = "$_d
$_f" ]
}
# Try to have a loader in a scratch folder (_w) of the best folder, which is there or was named by the user. _t: its path, else empty. It checks itself and the program, and
# moves to $_f (loader.c). dd and install run side by side; what dd says of the blocks it read tells a file that is cut off.
oc_fast() {
  [ "$_a" != "$_s" ] && [ ! -L "$_d" ] && { [ -d "$_c" ] || [ "$_c" = "${OPENCOTI_LLAMAFILE_CACHE-}" ]; } || return 0
  [ ! -e "$_d" ] || { [ -O "$_d" ] && [ "$(find "$_d" -prune ! -perm -20 ! -perm -2)" ]; } || return 0
  # A name of our own: containers that share the folder count their processes from 1.
  _x=
  { read -r _x </proc/sys/kernel/random/uuid; } 2>/dev/null
  _w=$_d/new.$$$_x
  [ -e "$_w" ] && _w= && return
  case $({ LC_ALL=C dd if="$_p" bs=4096 skip=$_l count=@BLOCKS@ 2>&3 | install -Dm 700 /dev/stdin "$_w/$_e"; } 3>&1 2>/dev/null) in
  "@BLOCKS@+0 "*) [ ! -O "$_d" ] || [ -L "$_d" ] || [ ! -x "$_w/$_e" ] || _t=$_w/$_e;;
  esac
}
oc_slow() {
  PATH=${_z:+$_z:}/usr/bin:/bin
  [ -z "$_w" ] || rm -rf "$_w"
  _w=
  _x=$(dd if="$_p" bs=4096 skip=@SKIP@ count=@COUNT@ 2>/dev/null)
  case $_x in
  *": end of stage 2") eval "$_x";;
  *) printf '%s\n' "$_e: $_p is cut off or cannot be read; download it again" >&2; exit 126;;
  esac
}
oc_run() {
  PATH=$_z
  export OPENCOTI_SELF="$_p" OPENCOTI_SELF_EXE="$_f"
  exec "$@"
}
_t=
_w=
if [ -n "$_i" ] && [ ! -e "$_i" ] || ! oc_each oc_quick; then
  case ${ZSH_VERSION-}${OPENCOTI_LLAMAFILE_CACHE:-/} in
  /*) oc_each oc_fast || :;;
  esac
  # Where a system forbids to run it, in spite of [ -x ], a shell ends: bash can be told not to, others have a last word. zsh has neither
  # and does not see a noexec mount, so it copies.
  if [ "$_t" ]; then
    [ -z "${BASH_VERSION-}" ] || shopt -s execfail
    trap 'oc_slow; oc_run "$_f" "$@"' 0
    oc_run "$_t" "$@" || :
    trap - 0
  fi
  oc_slow
fi
oc_run "$_f" "$@"
exit 126
#@@ stage 2
# _r: one line a refused folder, why; _w: our scratch folder, to be removed whatever happens; _n: a line end.
_r=
_n='
'
oc_say() {
  printf '%s\n' "$_e: $*" >&2
}
oc_debug() {
  case ${OPENCOTI_LLAMAFILE_DEBUG-} in
  ''|0) ;;
  *) oc_say "$@";;
  esac
}
oc_clean() {
  [ -z "$_w" ] || rm -rf "$_w"
  _w=
}
oc_no() {
  _r="$_r$_n  $_d $1"
  oc_debug "refused: $_d $1"
  oc_clean
  return 1
}
# What a tool said in its first line, without its own name and the path.
oc_why() {
  _x=${1%%"$_n"*}
  _x=${_x##*: }
  printf '%s' "${_x:-no reason given}"
}
oc_has() {
  command -v "$1" >/dev/null 2>&1
}
# Standard input -> its sha256 somewhere in a line; fails where no program for that exists.
oc_sha() {
  if oc_has sha256sum; then sha256sum
  elif oc_has shasum; then shasum -a 256
  elif oc_has openssl; then openssl dgst -sha256
  elif oc_has sha256; then sha256
  else return 1
  fi 2>/dev/null
}
# The program as it lies in this file, on standard output; up to 64 KiB of what follows it come along.
oc_read() {
  LC_ALL=C dd if="$_p" bs=65536 skip=$_o count=$(((_s + 65535) / 65536))
}
# The fixed time. It is set before bytes are checked, so that a write during or after the check shows; where it cannot be set,
# the next start simply checks again. -c: without it, GNU touch opens the file for writing, and for that moment another start
# could not run it (text file busy).
oc_touch() {
  TZ=UTC0 touch -c -t 198001010000.00 "$@" 2>/dev/null
}
# Is file $1 the program, or its loader? The CRC of cksum, which POSIX promises and which costs a tenth of a sha256, is against accidents; who
# can write to our private folder needs no forgery. _g: what is wrong.
oc_good() {
  _g="has the wrong checksum"
  if _x=$(cksum <"$1" 2>/dev/null) && [ "$_x" ]; then
    case $_x in
    "$_k $_s"|"$_k $_s "*|"${_y:-x} $_a"|"${_y:-x} $_a "*) return 0;;
    *" $_s"|*" $_s "*) ;;
    *) _g="has the wrong size";;
    esac
    return 1
  fi
  if _x=$(oc_sha <"$1"); then
    case $_x in
    *$_h*) return 0;;
    esac
    return 1
  fi
  oc_read 2>/dev/null | head -c "$_s" | cmp -s - "$1"
}
# Makes the scratch folder _w, under a name of our own as in oc_fast. When it cannot be made, _w stays empty and _q says why. A folder
# that was in the way may be gone by the time we look.
oc_scratch() {
  _j=
  { read -r _j </proc/sys/kernel/random/uuid; } 2>/dev/null
  _j=$$$_j
  until _q=$(umask 077; LC_ALL=C mkdir "$_d/new.$_j" 2>&1); do
    case $(oc_why "$_q") in
    *exists) ;;
    *) [ -e "$_d/new.$_j" ] || return;;
    esac
    _j=${_j}1
  done
  _w=$_d/new.$_j
}
# Stamp and probe, in the scratch folder. Only starting something tells whether programs may run there: [ -x ] is true on a
# noexec mount in some shells.
oc_prepare() {
  { echo "ok $_b" >"$_w/$_e.ok" && printf '#!/bin/sh\nexit 0\n' >"$_w/probe"; } 2>/dev/null
}
oc_probe() {
  chmod 700 "$_w/probe" "$@" && "$_w/probe"
} 2>/dev/null
# Try to have a good program in folder _d. A folder that the user named is made with its parents; the cache of the home and the one
# beside this file are made; the system's own (TMPDIR, /var/tmp...) are there or not for us to make.
oc_extract() {
  oc_debug "trying $_d"
  oc_clean
  if [ ! -d "$_c" ]; then
    case $_c in
    "${OPENCOTI_LLAMAFILE_CACHE-}") _q=$(LC_ALL=C mkdir -p "$_c" 2>&1);;
    "${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}"|"${_p%/*}/.llamafile") _q=$(LC_ALL=C mkdir "$_c" 2>&1);;
    *) oc_no "cannot be made: $_c does not exist"; return 1;;
    esac || [ -d "$_c" ] || { oc_no "cannot be made: $(oc_why "$_q")"; return 1; }
  fi
  if [ ! -L "$_d" ] && [ ! -e "$_d" ]; then
    _q=$(umask 077; LC_ALL=C mkdir "$_d" 2>&1) || [ -d "$_d" ] || { oc_no "cannot be made: $(oc_why "$_q")"; return 1; }
  else
    [ ! -L "$_d" ] || { oc_no "is a symbolic link"; return 1; }
    [ -d "$_d" ] || { oc_no "is not a folder"; return 1; }
    [ -O "$_d" ] || { oc_no "belongs to another user"; return 1; }
    if [ -z "$(find "$_d" -prune ! -perm -20 ! -perm -2)" ]; then
      chmod 700 "$_d" 2>/dev/null || { oc_no "can be written by other users"; return 1; }
    fi
    # Scratch of starts that were killed more than a day ago.
    find "$_d/." ! -name . -prune -name 'new.*' -mtime +1 -exec rm -rf {} \; 2>/dev/null
  fi
  oc_scratch
  if [ -f "$_f" ] && [ ! -L "$_f" ] && [ -O "$_f" ]; then
    oc_touch "$_f"
    [ -x "$_f" ] || chmod 700 "$_f" 2>/dev/null
    if oc_good "$_f" && { [ -x "$_f" ] || { _g="is not executable"; false; }; }; then
      # A read-only or full folder cannot be probed: the program in it gets the benefit of the doubt.
      if [ "$_w" ] && oc_prepare; then
        oc_probe || { oc_no "does not allow programs to run (mounted noexec?)"; return 1; }
        oc_touch "$_w/$_e.ok"
        mv -f "$_w/$_e.ok" "$_f.ok" 2>/dev/null
      fi
      oc_clean
      oc_debug "checked $_f"
      return 0
    fi
    oc_debug "$_f $_g: it will be replaced"
  fi
  [ "$_w" ] || { oc_no "cannot be written: $(oc_why "$_q")"; return 1; }
  oc_prepare || { oc_no "has no space left"; return 1; }
  _t=$_w/$_e
  _q=$({ umask 077; oc_read >"$_t" && LC_ALL=C dd if=/dev/null of="$_t" bs=1 seek=$_s; } 2>&1) || {
    oc_no "cannot take the program ($((_s / 1048576 + 1)) MiB): $(oc_why "$_q")"
    return 1
  }
  oc_touch "$_t" "$_w/$_e.ok"
  oc_good "$_t" || {
    [ -f "$_t" ] || { oc_no "lost the program while it was checked"; return 1; }
    [ "$(oc_read 2>/dev/null | wc -c)" -ge "$_s" ] || _g="is cut off"
    oc_clean
    oc_say "the program for $_m inside $_p $_g: the file is damaged, download it again"
    exit 126
  }
  oc_probe "$_t" || { oc_no "does not allow programs to run (mounted noexec?)"; return 1; }
  # Whatever else has taken the place of our names goes, except a folder: its content may be somebody's.
  for _x in "$_d/$_h" "$_f"; do
    if [ -L "$_x" ]; then rm -f "$_x" 2>/dev/null; fi
  done
  [ ! -d "$_f" ] || { oc_no "has a folder where the program belongs ($_f)"; return 1; }
  [ -d "$_d/$_h" ] || _q=$(LC_ALL=C mkdir "$_d/$_h" 2>&1) || {
    [ -d "$_d/$_h" ] || { rm -f "$_d/$_h" && mkdir "$_d/$_h"; } 2>/dev/null || { oc_no "cannot take the program: $(oc_why "$_q")"; return 1; }
  }
  # The program first: a stamp without it says nothing.
  _q=$(LC_ALL=C mv -f "$_t" "$_t.ok" "$_d/$_h/" 2>&1) || { oc_no "cannot take the program: $(oc_why "$_q")"; return 1; }
  oc_clean
  oc_debug "extracted $_f"
}
if [ -n "$_i" ] && [ ! -e "$_i" ]; then
  oc_say "the program for $_m cannot start here: it needs glibc, and this system has no $_i; its C library is not glibc (Alpine and other musl systems) or lies elsewhere (NixOS). Use a glibc system or container."
  exit 126
fi
case ${OPENCOTI_LLAMAFILE_CACHE-} in
''|/*) ;;
*) oc_say "OPENCOTI_LLAMAFILE_CACHE is not an absolute path: ignored";;
esac
trap 'oc_clean; exit 129' 1
trap 'oc_clean; exit 130' 2
trap 'oc_clean; exit 143' 15
oc_each oc_extract || {
  oc_say "found no folder to put its program into:$_r$_n  Set OPENCOTI_LLAMAFILE_CACHE to a folder that has $((_s / 1048576 + 1)) MiB free and is not mounted noexec."
  exit 126
}
trap - 1 2 15
: end of stage 2
