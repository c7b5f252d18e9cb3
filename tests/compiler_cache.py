"""A C compiler that compiles the same sources once for all test processes."""

import os
import shlex
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
key=$({{ echo "$flags"; cat "${{source%/*}}"/*.c; }} | cksum | tr ' ' -)
mkdir -p "$kept"
exec 9>"$kept/$level.lock"
if command -v flock >/dev/null; then flock 9; fi
if ! [ -e "$kept/$level-$key" ]; then
    "$compiler" "$@" 9>&- || exit
    cp "$built" "$kept/$level-$key.$$" && mv "$kept/$level-$key.$$" "$kept/$level-$key"
fi
exec cp "$kept/$level-$key" "$built"
"""


def write_caching_compiler(folder: Path, compiler: str) -> Path:
    """A program in ``folder`` with the options of ``compiler``, which keeps compiled products."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "cc"
    words = {"compiler": shlex.quote(compiler), "kept": shlex.quote(str(folder / "kept"))}
    new = folder / f"cc.{os.getpid()}"
    new.write_text(_SCRIPT.format(**words), encoding="utf-8")
    new.chmod(0o700)
    new.replace(program)
    return program
