"""``python -m fornax``: the command of the same name, which the wheel puts on the path."""

import os
import sys
import sysconfig
from pathlib import Path


def binary() -> Path:
    """Where the command is: beside this interpreter's other scripts, or the user's."""
    name = "fornax" + (sysconfig.get_config_var("EXE") or "")
    folders = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", scheme=_user_scheme())]
    # `pip install --target` puts scripts beside packages.
    folders.append(str(Path(__file__).parents[1] / "bin"))
    for folder in folders:
        if (path := Path(folder) / name).is_file():
            return path
    raise SystemExit(f"fornax is not among the scripts of {sys.executable}; install the package again")


def _user_scheme() -> str:
    return sysconfig.get_preferred_scheme("user")


if __name__ == "__main__":
    path = str(binary())
    os.execv(path, [path, *sys.argv[1:]])
