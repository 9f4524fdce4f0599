"""Calls that run what is in a file, a string or a stranger's package: none outside of
the list below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from places import ROOT

FOLDERS = ("rlhf_megatron", "tools", "benchmarks", "examples", "launch")

FORBIDDEN = {  # last parts of a called name -> what to use instead
    "pickle.load": "a format that holds data only",
    "pickle.loads": "a format that holds data only",
    "pickle.Unpickler": "a format that holds data only",
    "cPickle.load": "a format that holds data only",
    "dill.load": "a format that holds data only",
    "dill.loads": "a format that holds data only",
    "cloudpickle.load": "a format that holds data only",
    "cloudpickle.loads": "a format that holds data only",
    "joblib.load": "a format that holds data only",
    "marshal.loads": "a format that holds data only",
    "marshal.load": "a format that holds data only",
    "shelve.open": "a format that holds data only",
    "pd.read_pickle": "a format that holds data only",
    "yaml.load": "yaml.safe_load",
    "yaml.load_all": "yaml.safe_load_all",
    "yaml.unsafe_load": "yaml.safe_load",
    "yaml.full_load": "yaml.safe_load",
    "eval": "ast.literal_eval, or a parser",
    "exec": "an import by path",
    "os.system": "subprocess.run with a list",
    "os.popen": "subprocess.run with a list",
    "subprocess.getoutput": "subprocess.run with a list",
    "subprocess.getstatusoutput": "subprocess.run with a list",
    "tempfile.mktemp": "tempfile.mkstemp",
    "ssl._create_unverified_context": "the default context",
    "jinja2.Environment": "ImmutableSandboxedEnvironment",
    "jinja2.Template": "ImmutableSandboxedEnvironment",
    "extractall": "extraction with filter='data'",
}
IMPORTED_ALONE = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "yaml",
    "os",
    "subprocess",
    "jinja2",
}
FORBIDDEN_KEYWORDS = {
    "shell": True,
    "trust_remote_code": True,
    "verify": False,
    "allow_pickle": True,
}
NEEDED_KEYWORDS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}

ALLOWED = {  # (file, what) -> why
    (
        "rlhf_megatron/weights/safe_pickle.py",
        "pickle.Unpickler",
    ): "over inert stand-ins, with a list of globals",
    ("rlhf_megatron/rewards/sandbox/harness.py", "exec"): "programs of a policy, inside a sandbox",
}


def name_of(node: ast.expr) -> str:
    """a.b.c of an attribute or a name; "?" for what has no name."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def problems(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, what, use instead) of everything forbidden."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in IMPORTED_ALONE:
            for alias in node.names:
                if (what := f"{node.module}.{alias.name}") in FORBIDDEN:
                    yield node.lineno, what, FORBIDDEN[what]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name in IMPORTED_ALONE:
                    yield node.lineno, f"import {alias.name} as {alias.asname}", "its own name"
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                if (what := name_of(base)) in FORBIDDEN:
                    yield node.lineno, what, FORBIDDEN[what]
        elif isinstance(node, ast.Call):
            yield from call_problems(node)


def call_problems(node: ast.Call) -> Iterator[tuple[int, str, str]]:
    name = name_of(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    for what in {name, name.rpartition(".")[2]} & FORBIDDEN.keys():
        # model.eval() is torch's
        is_method = what in ("eval", "exec") and name not in (what, f"builtins.{what}")
        has_filter = what == "extractall" and "filter" in keywords
        if not is_method and not has_filter:
            yield node.lineno, what, FORBIDDEN[what]
    for key, forbidden in FORBIDDEN_KEYWORDS.items():
        value = keywords.get(key)
        if value is not None and not (
            isinstance(value, ast.Constant) and value.value is not forbidden
        ):
            yield node.lineno, f"{key}={ast.unparse(value)}", f"{key}={not forbidden}, written out"
    if name in NEEDED_KEYWORDS:
        key, needed = NEEDED_KEYWORDS[name]
        value = keywords.get(key)
        if not (isinstance(value, ast.Constant) and value.value is needed):
            yield node.lineno, f"{name} without {key}={needed}", f"{key}={needed}"


def test_nothing_runs_what_it_reads() -> None:
    found: dict[tuple[str, str], str] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            for line, what, instead in problems(path.read_text()):
                found[file, what] = f"{file}:{line}: {what}; use {instead}"
    assert not [text for key, text in found.items() if key not in ALLOWED]
    assert not [key for key in ALLOWED if key not in found], "allowed, but gone"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "from pickle import loads",
        "import pickle as p\np.loads(b'')",
        "class U(pickle.Unpickler): pass",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=is_safe)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval('1')",
        "builtins.exec(code)",
        "subprocess.run('ls', shell=True)",
        "subprocess.run(x, shell=is_shell)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "os.system('ls')",
        "requests.get(url, verify=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "tar.extractall(path)",
    ],
)
def test_the_lint_sees(source: str) -> None:
    assert len(list(problems(source))) >= 1, source


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "yaml.safe_load(text)",
        "model.eval()",
        "load(path).eval()",
        "subprocess.run(['ls'], shell=False)",
        "pickle.dumps(1)",
        "np.load(path, allow_pickle=False)",
        "tar.extractall(path, filter='data')",
        "ast.literal_eval('1')",
    ],
)
def test_the_lint_lets_pass(source: str) -> None:
    assert list(problems(source)) == []
