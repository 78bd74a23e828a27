"""Other people's clients against a real server: each in an environment of its own, versions pinned.

    python tests/clients/run.py [NAME ...]

The server is this environment's, with the embedded model in float32. A client is a script beside this file;
its first line, "# needs: ", names the packages that it needs, as pip's arguments, a second, "# serve: ",
options of the server, and its exit status says whether it is content. One that needs `ramet` runs an adapter:
it finds this environment's packages behind its own.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from ramet.api.serve_process import serving

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
NAMES = (
    "openai_sdk",
    "langchain_chat",
    "inspect_eval",
    "lm_eval_scores",
    "treequest_search",
    "treequest_adapter",
    "inspect_adapter",
    "llm_reasoners_search",
    "trl_grpo",
    "schema_fuzz",
    "curl_cut",
)


def main() -> int:
    """Run the clients that were named, or all; returns how many were not content."""
    names = sys.argv[1:] or NAMES
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        print(f"no such client: {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        print(f"==> {name}", flush=True)
        script = HERE / f"{name}.py"
        python, options = _python_for(script), _words_of(script, "# serve:")
        with serving("smollm2", "--dtype", "float32", "--num-blocks", "1024", *options) as url:
            done = subprocess.run([python, script, url, sys.executable], check=False)
        if done.returncode:
            failed.append(name)
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


def _words_of(script: Path, mark: str) -> list[str]:
    """What a script's leading comments say after a mark."""
    first = script.read_text().splitlines()[:2]
    return [word for line in first if line.startswith(mark) for word in line.removeprefix(mark).split()]


def _python_for(script: Path) -> Path:
    """The interpreter of the environment that a script asks for; made once for each list of packages."""
    needs = _words_of(script, "# needs:")
    key = hashlib.sha256(" ".join(needs).encode()).hexdigest()[:12]
    folder = ENVIRONMENTS / f"{script.stem}-{key}"
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        if "ramet" in needs:
            (site_packages,) = folder.glob("lib/python*/site-packages")
            lend = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            (site_packages / "ramet_environment.pth").write_text(lend)
        packages = [need for need in needs if need != "ramet"]
        if packages:
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, *packages], check=True)
        (folder / ".installed").touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
