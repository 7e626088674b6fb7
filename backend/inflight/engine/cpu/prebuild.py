"""Compiles the layers once for many machines: `python -m inflight.engine.cpu.prebuild [DTYPE]...`.

For wheels, and for images whose containers have no compiler. The results are stored in the package, for each
target of the architecture that the compiler (CXX) compiles for. A library runs on every processor with the
instruction sets that its dtype needs, whatever processor built it. One thread.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from inflight.engine.cpu.library import CannotBuild, prebuild, targets_of_compiler

_KINDS = ("bfloat16", "int8", "float32")


def main() -> int:
    """Compile for the dtypes that the command line names, or for all; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "dtypes", nargs="*", metavar="DTYPE", help=f"one of {', '.join(_KINDS)}; default: all"
    )
    dtypes = parser.parse_args().dtypes or _KINDS
    if unknown := sorted(set(dtypes) - set(_KINDS)):
        parser.error(f"no compiled code for {', '.join(unknown)}, only for {', '.join(_KINDS)}")
    try:
        for target, kind in itertools.product(targets_of_compiler(), dtypes):
            is_int8 = kind == "int8"
            dtype = "bfloat16" if is_int8 else kind
            if dtype in target.dtypes:
                sys.stdout.write(f"{prebuild(target, dtype, is_int8)}\n")
    except CannotBuild as error:
        sys.stderr.write(f"prebuild: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
