# Sourced by the scripts beside it: finds a Python, makes .venv, installs what is missing.
#
# `bootstrap serve`, `bootstrap test` or `bootstrap client` leaves the environment's interpreter in $PYTHON. What was
# installed is noted in a stamp file, so that a later call costs a few milliseconds. Everything is said on stderr.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON=""
# Python cannot find what is installed in a folder whose name has letters that the locale cannot spell.
[ "$(locale charmap 2>/dev/null)" = UTF-8 ] || export LC_ALL=C.UTF-8
# Works for the interpreters that the embedded server brings a backend for and torch has wheels for.
IN_RANGE='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
die() { say "$@"; exit 1; }

# bootstrap serve|test|client [--no-venv]
#
# A client's tools are not installed beside a server that may be running: they have an environment of their own, unless
# the tests' is there, which has them too.
bootstrap() {
  local purpose=$1 stamp wanted
  [ "$purpose" != client ] || are_tests_installed || VENV="$ROOT/.venv-client"
  if [ "${2:-}" = --no-venv ]; then use_active_environment; else use_venv_if_made; fi
  wanted="$(fingerprint)"
  if [ -n "$PYTHON" ]; then
    stamp="$(stamp_file "$purpose")"
    [ "$purpose" != client ] || [ "$VENV" = "$ROOT/.venv-client" ] || return 0
    [ ! -f "$stamp" ] || [ "$(<"$stamp")" != "$wanted" ] || return 0
  fi
  # Two first starts at the same time must not install over each other.
  exec 9<"$ROOT"
  command -v flock >/dev/null && flock 9
  [ -n "$PYTHON" ] || make_venv
  [ "$purpose" = client ] || ensure_libpython
  # The tests ask the server as README's readers do.
  [ "$purpose" != test ] || command -v curl >/dev/null || apt_install curl || say "the tests need curl; install it"
  # And they look at the playground with a browser; playwright would have to download one.
  [ "$purpose" != test ] || command -v chromium >/dev/null || command -v chromium-browser >/dev/null ||
    apt_install chromium || say "the tests of the playground need chromium; install it"
  # And they run compiled layers for Arm by an emulator.
  [ "$purpose" != test ] || { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } >/dev/null ||
    apt_install g++-aarch64-linux-gnu qemu-user ||
    say "the tests of compiled layers for Arm need g++-aarch64-linux-gnu and qemu-user; install them"
  install "$purpose"
  printf '%s' "$wanted" >"$(stamp_file "$purpose")"
  exec 9<&-
}

are_tests_installed() {
  local stamp="$VENV/.inflight-test"
  [ -x "$VENV/bin/perf_analyzer" ] && [ -f "$stamp" ] && [ "$(<"$stamp")" = "$(fingerprint)" ]
}

# A .venv that is broken or was never finished is made again; one of another Python may be somebody's.
use_venv_if_made() {
  [ -x "$VENV/bin/pip" ] && "$VENV/bin/python" -c "" 2>/dev/null || return 0
  "$VENV/bin/python" -c "$IN_RANGE" || die ".venv is not of Python 3.10, 3.11 or 3.12: remove it, or use --no-venv"
  PYTHON="$VENV/bin/python"
}

use_active_environment() {
  PYTHON="$(command -v python || command -v python3)" || die "--no-venv: no python on PATH"
  "$PYTHON" -c "$IN_RANGE" || die "--no-venv: $PYTHON is not Python 3.10, 3.11 or 3.12"
}

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.10 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "$IN_RANGE" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.10, 3.11 or 3.12 on PATH"
}

make_venv() {
  local base version
  base="$(find_python)"
  version="$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  say "making $(basename "$VENV") with $base (Python $version)"
  if ! "$base" -m venv --clear "$VENV" >/dev/null 2>&1; then
    # Debian keeps ensurepip in a package of its own.
    apt_install "python$version-venv" && "$base" -m venv --clear "$VENV" >&2 ||
      die "$base -m venv does not work; on Debian and Ubuntu install python$version-venv"
  fi
  PYTHON="$VENV/bin/python"
}

# The Python backend is linked with libpython, which a statically linked Python does without.
ensure_libpython() {
  local missing
  missing="$(cd "$ROOT" && "$PYTHON" - <<'PY'
import ctypes.util, pathlib, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
name = "libpython%s.so.1.0" % version
folders = [sysconfig.get_config_var("LIBDIR") or "", sys.base_prefix + "/lib"]
if not any((pathlib.Path(f) / name).exists() for f in folders) and not ctypes.util.find_library("python" + version):
    print("libpython" + version)
PY
)"
  [ -z "$missing" ] || apt_install "$missing" || say "the server will need $missing; install it first"
}

# Installs Debian packages where that is possible; otherwise returns non-zero.
apt_install() {
  local as_root=()
  command -v apt-get >/dev/null || return 1
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null || return 1
    as_root=(sudo -n)
  fi
  say "apt-get install $*"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -yqq "$@" >/dev/null 2>&1 && return
  "${as_root[@]}" apt-get update -qq >&2 &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -yqq "$@" >&2
}

install() {
  local extra="[mpi]" quiet=(-qq)
  [ "$1" = test ] && extra="[test]"
  [ -t 2 ] && quiet=()
  say "installing into $("$PYTHON" -c 'import sys; print(sys.prefix)') (a minute or two, once)"
  (
    cd "$ROOT"
    pip() { "$PYTHON" -m pip --disable-pip-version-check install --no-warn-conflicts "${quiet[@]}" -c constraints.txt "$@" >&2; }
    if [ "$1" = client ]; then
      # perf_analyzer is in one wheel, libraries that it needs in the other.
      pip --no-deps tritonclient nvidia-pytriton
      return
    fi
    # The server's wheel asks for a client stack that nothing here uses.
    pip -e ".$extra" -e client && pip --no-deps nvidia-pytriton && spell_in_ascii
  ) || die "installing failed"
}

# The Python of the server's models reads .pth files, and spells what it imports, in ASCII, whatever the locale. From
# a folder with other letters in its name the package is imported by a link beside the other packages.
spell_in_ascii() {
  "$PYTHON" - "$ROOT/backend" <<'PY'
import os, pathlib, sys, sysconfig
packages, link = pathlib.Path(sysconfig.get_path("purelib")), pathlib.Path(sys.prefix, "inflight-backend")
for file in packages.glob("__editable__.inflight-*.pth"):
    if not file.read_bytes().isascii():
        link.unlink(missing_ok=True)
        link.symlink_to(sys.argv[1])
        file.write_text(os.path.relpath(link, packages) + "\n")
PY
}

stamp_file() { printf '%s/.inflight-%s' "$("$PYTHON" -c 'import sys; print(sys.prefix)')" "$1"; }

# Changes with what is to be installed, and with the folder, as the packages are installed from it in place.
fingerprint() {
  (cd "$ROOT" && { pwd -P; cat pyproject.toml constraints.txt client/pyproject.toml scripts/lib.sh; } | sha256sum)
}
