"""What starting ``vlfit`` loads: the packages of others, by name. How long it takes is not tested."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from tests.golden.conftest import environment
from tests.golden.kept import check_facts

# What the interpreter loads by itself (a finder of an editable install, sitecustomize) is not counted.
PROGRAM = """
import json, sys
before = set(sys.modules)
def run():
{body}
try:
    run()
except SystemExit:
    pass
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
ours = {{"vlfit", *sys.stdlib_module_names}}
others = sorted(name for name in new - ours if not name.startswith("_sysconfigdata"))
print("\\n" + json.dumps(others))
"""
MAIN = "    sys.argv = {words}\n    from vlfit.cli.main import main\n    main()"


def loaded(body: str, home: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        capture_output=True,
        text=True,
        check=True,
        cwd=home,
        env=environment(home),
    )
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def test_packages(empty_home: Path) -> None:
    found = {
        "import vlfit": loaded("    import vlfit", empty_home),
        "from vlfit import VlfitError": loaded("    from vlfit import VlfitError", empty_home),
        "from vlfit import VLM, Client, Answer": loaded(
            "    from vlfit import VLM, Client, Answer", empty_home
        ),
    }
    for words in ("--help", "plan --help", "plan 4B --gpu 'RTX 5060' --json", "machine --cards"):
        found[f"vlfit {words}"] = loaded(MAIN.format(words=["vlfit", *shlex.split(words)]), empty_home)
    check_facts("loads.json", found)
