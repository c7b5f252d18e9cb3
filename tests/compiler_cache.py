"""A C compiler that compiles the same sources once, for all test processes and for later runs."""

import os
import shlex
import sys
from pathlib import Path

# Each worker, each program that a test starts and each test with a cache folder of its own would compile the
# products again, for five seconds and more. What is not the products goes to the compiler as it is.
_SCRIPT = """#!/bin/sh
compiler={compiler}
kept={kept}
for word; do
    case $before in -o) built=$word ;; esac
    case $word in *.c) source=$word ;; /*) ;; *) flags="$flags $word" ;; esac
    before=$word
done
case $built in */products-*.so) ;; *) exec "$compiler" "$@" ;; esac
level=${{built##*/}}
level=${{level%-*}}
key=$({{ "$compiler" --version; echo "$flags"; cat "${{source%/*}}"/*.c; }} | cksum | tr ' ' -)
mkdir -p "$kept"
exec 9>"$kept/$level.lock"
if command -v flock >/dev/null; then flock 9; fi
if ! [ -e "$kept/$level-$key" ]; then
    find "$kept" -name "$level-*-*" -mtime +7 -exec rm -f {{}} +
    "$compiler" "$@" 9>&- || exit
    cp "$built" "$kept/$level-$key.$$" && mv "$kept/$level-$key.$$" "$kept/$level-$key"
fi
exec cp "$kept/$level-$key" "$built"
"""


def write_caching_compiler(folder: Path, compiler: str) -> Path:
    """A program in ``folder`` with the options of ``compiler``, which keeps compiled products.

    They are kept in the tests' environment, so that ``make clean`` removes them; without one in ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "cc"
    in_environment = sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK)
    kept = Path(sys.prefix) / "compiled-for-tests" if in_environment else folder / "kept"
    words = {"compiler": shlex.quote(compiler), "kept": shlex.quote(str(kept))}
    new = folder / f"cc.{os.getpid()}"
    new.write_text(_SCRIPT.format(**words), encoding="utf-8")
    new.chmod(0o700)
    new.replace(program)
    return program
