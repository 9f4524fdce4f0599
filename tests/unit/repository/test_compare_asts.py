"""The comparison of syntax trees lets renames pass, and nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tools.compare_asts import main

pytestmark = pytest.mark.long  # 140 small repositories; the tool is for one occasion

HEADERS = {
    "moves": "old\tnew\n",
    "renames": "old path\told name\tnew name\n",
    "changed_modules": "new path\tpoints\treason\n",
}
MODULE = "rlhf_megatron/scheduler/run.py"
OTHER_MODULE = "rlhf_megatron/data/rows.py"


class Repository:
    """A small repository with a package in it, and the three tables."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write({"rlhf_megatron/__init__.py": ""})

    def write(self, files: Mapping[str, str]) -> None:
        for path, text in files.items():
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    def commit(self) -> None:
        git = ["git", "-c", "user.name=tester", "-c", "user.email=tester@example.com"]
        for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "base"]):
            subprocess.run([*git, *arguments], cwd=self.root, check=True)

    def write_table(self, name: str, rows: Sequence[Sequence[str]]) -> None:
        lines = "".join("\t".join(row) + "\n" for row in rows)
        self.write({f"docs/dev/{name}.tsv": HEADERS[name] + lines})

    def compare(
        self,
        old: Mapping[str, str],
        new: Mapping[str, str],
        moves: Sequence[tuple[str, str]] = (),
        renames: Sequence[tuple[str, str, str]] = (),
        changed_modules: Sequence[tuple[str, str, str]] = (),
        options: Sequence[str] = (),
    ) -> int:
        """Commit the old files, put the new files in their place, and return the exit code."""
        self.write(old)
        self.commit()
        for path in old:
            (self.root / path).unlink()
        self.write(new)
        self.write_table("moves", moves)
        self.write_table("renames", renames)
        self.write_table("changed_modules", changed_modules)
        return main(["--base", "HEAD", *options])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.chdir(tmp_path)
    return Repository(tmp_path)


# ---------------------------------------------------------------------- one module

RENAMES = [
    (MODULE, "told", "read_exit_code"),
    (MODULE, "told(given)", "process_id"),
    (MODULE, "told(found)", "time_limit"),
    (MODULE, "told.asked", "ask_process"),
    (MODULE, "Reached", "RunConnections"),
    (MODULE, "Reached.held", "engine_names"),
    (MODULE, "Reached.wanted", "num_engines"),
    (MODULE, "Reached.shut", "close_connections"),
    (MODULE, "Reached.shut(who)", "engine_name"),
    (OTHER_MODULE, "Row.told", "describe_row"),
    (OTHER_MODULE, "Row.own", "missing_keys"),
]
CLASS = """
class Reached:
    held: list
    wanted: int = 0

    def shut(self, who, grace=5):
        self.held.remove(who)
        return self.wanted - grace
"""
RENAMED_CLASS = """
class RunConnections:
    engine_names: list
    num_engines: int = 0

    def close_connections(self, engine_name, grace=5):
        self.engine_names.remove(engine_name)
        return self.num_engines - grace
"""
FUNCTION = """
def told(given, found):
    def asked():
        return given
    return asked() - found
"""
RENAMED_FUNCTION = """
def read_exit_code(process_id, time_limit):
    def ask_process():
        return process_id
    return ask_process() - time_limit
"""
KEYWORD_CALL = "\nRESULT = told(given=1, found=2)\n"
RENAMED_KEYWORD_CALL = "\nRESULT = read_exit_code(process_id=1, time_limit=2)\n"
CAUGHT = """
try:
    import os
except ImportError as error:
    print(error)
"""
MATCH = """
def told(given, found):
    match given:
        case Reached(held=[first, *rest]):
            return first, rest
"""
RENAMED_MATCH = """
def read_exit_code(process_id, time_limit):
    match process_id:
        case RunConnections(engine_names=[first, *rest]):
            return first, rest
"""

SAME = {
    "nothing": ("def f(x):\n    return x", "def f(x):\n    return x"),
    "function, parameters and inner function": (FUNCTION, RENAMED_FUNCTION),
    "class, fields and method": (CLASS, RENAMED_CLASS),
    "keywords": (FUNCTION + KEYWORD_CALL, RENAMED_FUNCTION + RENAMED_KEYWORD_CALL),
    "match": (CLASS + MATCH, RENAMED_CLASS + RENAMED_MATCH),
    "attribute of an object": (
        "def f(x):\n    return x.own",
        "def f(x):\n    return x.missing_keys",
    ),
    "docstring": ('def f():\n    """Old."""', 'def f():\n    """New words."""'),
    "docstring instead of pass": ("def f():\n    pass", 'def f():\n    """New."""'),
    "string below an assignment": ('SIZE = 1\n"""Old."""', 'SIZE = 1\n"""New."""'),
    "comments and layout": ("f(1, 2)", "f(\n    1,  # why\n    2,\n)"),
    "split": (
        "def f(x):\n    a, b = x, 2\n    return a, b",
        "def f(x):\n    a = x\n    b = 2\n    return a, b",
    ),
    "split of a tuple in a tuple": ("a, (b, c) = 1, (2, 3)", "a = 1\nb = 2\nc = 3"),
    "split beside a swap": ("a, b, c = b, a, 3", "a, b = b, a\nc = 3"),
    "split of attributes": (
        "class C:\n    def f(self, x):\n        self.x, self.y = x, self.z",
        "class C:\n    def f(self, x):\n        self.x = x\n        self.y = self.z",
    ),
    "swap": ("a, b = b, a", "a, b = b, a"),
    "joined string": ('f("one two" f" {x} three")', 'f("one " "two " f"{x} " "three")'),
    "added strings": ('f("one " + "two")', 'f("one two")'),
    "hoisted string": (
        'def f(x):\n    raise ValueError(f"no " f"{x}")',
        'def f(x):\n    message = f"no {x}"\n    raise ValueError(message)',
    ),
    "order of imports": (
        "import os\nfrom sys import argv, path",
        "from sys import path, argv\nimport os",
    ),
    "expression in a string": (
        FUNCTION + 'def f():\n    return f"{told=}"\n',
        RENAMED_FUNCTION + 'def f():\n    return f"{read_exit_code=}"\n',
    ),
    "type in a string": ('cast("Row[told] | None", x)', 'cast("Row[read_exit_code] | None", x)'),
    "name in a string": ('getattr(x, "told")', 'getattr(x, "read_exit_code")'),
    "names in a string": (
        'namedtuple("T", "told, own")',
        'namedtuple("T", "describe_row, missing_keys")',
    ),
    "exported names": (
        FUNCTION + '__all__ = ["told", "zero"]\nzero = 0',
        RENAMED_FUNCTION + '__all__ = ["zero", "read_exit_code"]\nzero = 0',
    ),
    "exception": (CAUGHT, CAUGHT),
    "global": (
        "def f():\n    global count\n    count = 1",
        "def f():\n    global count\n    count = 1",
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_lets_pass(case: str, repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = SAME[case]
    exit_code = _compare_module(repository, old, new)
    assert (
        capsys.readouterr().out
        == "3 modules: 3 equal, 0 listed as changed, 0 different, 0 missing\n"
    )
    assert exit_code == 0


def _compare_module(repository: Repository, old: str, new: str) -> int:
    """Compare a module; the rows of what neither of the two holds are left out."""
    other = "class Row:\n    own = 1\n\n    def told(self): ...\n"
    new_other = "class Row:\n    missing_keys = 1\n\n    def describe_row(self): ...\n"
    return repository.compare(
        {MODULE: old, OTHER_MODULE: other}, {MODULE: new, OTHER_MODULE: new_other}, renames=RENAMES
    )


DIFFERENT = {
    "constant": (FUNCTION + "LIMIT = 1", RENAMED_FUNCTION + "LIMIT = 2", "`1` became `2`"),
    "type of a constant": ("LIMIT = 1", "LIMIT = 1.0", "`1` became `1.0`"),
    "true for one": ("LIMIT = 1", "LIMIT = True", "`1` became `True`"),
    "operator": (FUNCTION, RENAMED_FUNCTION.replace("-", "+"), "Sub became Add"),
    "comparison": ("f(a < b)", "f(a <= b)", "Lt became LtE"),
    "swapped arguments": ("def f(a, b):\n    g(a, b)", "def f(a, b):\n    g(b, a)", "a became b"),
    "swapped arguments of renamed names": (
        FUNCTION,
        RENAMED_FUNCTION.replace("process_id, time_limit", "time_limit, process_id"),
        "told(given) must be process_id",
    ),
    "swapped values of renamed parameters": (
        "def told(given, found):\n    return given - found",
        "def read_exit_code(process_id, time_limit):\n    return time_limit - process_id",
        "given became time_limit here and process_id before",
    ),
    "swapped attributes of self": (
        CLASS + "\n    def f(self):\n        return self.held, self.wanted\n",
        RENAMED_CLASS + "\n    def f(self):\n        return self.num_engines, self.engine_names\n",
        "held became num_engines here and engine_names before",
    ),
    "attribute of self that kept its name": (
        CLASS,
        RENAMED_CLASS.replace("return self.num_engines", "return self.wanted"),
        "wanted became wanted here and num_engines before",
    ),
    "local": (
        "def f():\n    count = 1\n    return count",
        "def f():\n    total = 1\n    return total",
        "the local count became total",
    ),
    "local, with the row of another module": (
        "def f():\n    own = 1\n    return own",
        "def f():\n    missing_keys = 1\n    return missing_keys",
        "the local own became missing_keys",
    ),
    "local of a comprehension": ("[x for x in y]", "[z for z in y]", "the local x became z"),
    "local of a lambda": ("f(lambda x: x)", "f(lambda z: z)", "the local x became z"),
    "two locals that became one": (
        "def f():\n    a = 1\n    b = 2\n    return a, b",
        "def f():\n    a = 1\n    a = 2\n    return a, a",
        "b became a, as a did before",
    ),
    "function that is not in the table": ("def f(): ...", "def g(): ...", "f became g, and"),
    "function with the row of another module": (
        "def own(): ...",
        "def missing_keys(): ...",
        "own became missing_keys, and",
    ),
    "function with another name than its row": (
        FUNCTION,
        RENAMED_FUNCTION.replace("read_exit_code", "describe_row"),
        "told must be read_exit_code",
    ),
    "function that kept its name": (
        FUNCTION,
        RENAMED_FUNCTION.replace("read_exit_code", "told"),
        "told must be read_exit_code",
    ),
    "method that is not in the table": (
        "class C:\n    def f(self): ...",
        "class C:\n    def g(self): ...",
        "C.f became g, and",
    ),
    "parameter that is not in the table": (
        "class C:\n    def f(a): ...",
        "class C:\n    def f(b): ...",
        "C.f(a) became b",
    ),
    "parameter with the row of another function": (
        "def f(given): ...",
        "def f(process_id): ...",
        "f(given) became process_id",
    ),
    "attribute that is not in the table": ("f(x.a)", "f(x.b)", "the attribute a became b"),
    "attribute of a module outside of the package": (
        "import rows\nrows.own()",
        "import rows\nrows.missing_keys()",
        "rows.own became rows.missing_keys",
    ),
    "keyword that is not in the table": ("f(a=1)", "f(b=1)", "the keyword a became b"),
    "keyword that kept its name": (
        FUNCTION + KEYWORD_CALL,
        RENAMED_FUNCTION + RENAMED_KEYWORD_CALL.replace("process_id", "given"),
        "the keyword given became given",
    ),
    "keyword with the row of another function": (
        "def f(given): ...\nf(given=1)",
        "def f(given): ...\nf(process_id=1)",
        "the keyword given became process_id",
    ),
    "swapped keywords": (
        FUNCTION + KEYWORD_CALL,
        RENAMED_FUNCTION + "\nRESULT = read_exit_code(time_limit=1, process_id=2)\n",
        "the keyword given became time_limit",
    ),
    "attribute in a match": (
        CLASS + MATCH,
        RENAMED_CLASS + RENAMED_MATCH.replace("engine_names=", "num_engines="),
        "the attribute held became num_engines",
    ),
    "name in a match": (
        CLASS + MATCH,
        RENAMED_CLASS + RENAMED_MATCH.replace("rest", "left"),
        "rest became left",
    ),
    "name of an exception": (CAUGHT, CAUGHT.replace("error", "problem"), "error became problem"),
    "exception without a name": (
        CAUGHT.replace("(error)", "()"),
        CAUGHT.replace("(error)", "()").replace(" as error", ""),
        "error became no name",
    ),
    "builtin": ("f(min)", "f(max)", "the builtin name min became max"),
    "builtin that is covered": (
        "def f(told):\n    return min",
        "def f(min):\n    return min",
        "f(told) became min",
    ),
    "global instead of a local": (
        "count = 0\ndef f():\n    count = 1\n    return count",
        "count = 0\ndef f():\n    global count\n    count = 1\n    return count",
        "became `global count`",
    ),
    "global for a parameter": (
        "count = 0\ndef f(a):\n    return count",
        "count = 0\ndef f(a):\n    return a",
        "count and a belong to different scopes",
    ),
    "more global names": (
        "a, b = 1, 2\ndef f():\n    global a\n    a = b",
        "a, b = 1, 2\ndef f():\n    global a, b\n    a = b",
        "`global a` became `global a, b`",
    ),
    "covered global": (
        "count = 0\ndef f(given):\n    return count",
        "count = 0\ndef f(count):\n    return count",
        "f(given) became count",
    ),
    "statement that is gone": ("f()\ng()", "f()", "`g()` is gone"),
    "statement that is new": ("f()", "f()\ng()", "`g()` is new"),
    "order of statements": ("f(1)\nf(2)", "f(2)\nf(1)", "`1` became `2`"),
    "keyword that is gone": ("f(a=1, b=2)", "f(a=1)", "a call had 2 keywords and has 1"),
    "keyword instead of a mapping": ("f(**a)", "f(a=a)", "`**a` became `a=a`"),
    "attribute instead of a name": ("f(a)", "f(a.b)", "`a` became `a.b`"),
    "argument that is gone": ("f(1, 2)", "f(1)", "args had 2 parts and has 1"),
    "default": ("def f(a=1): ...", "def f(a=2): ...", "`1` became `2`"),
    "annotation": ("def f(a: int): ...", "def f(a: str): ...", "the builtin name int became str"),
    "decorator": ("@cache\ndef f(): ...", "def f(): ...", "decorator_list had 1 parts and has 0"),
    "keyword only": ("def f(a, *, b): ...", "def f(a, b): ...", "a function had 1 parameters"),
    "starred parameter": ("def f(*a): ...", "def f(a): ...", "a function had 0 parameters (args)"),
    "starred parameter that is gone": ("def f(*a): ...", "def f(): ...", "has vararg on one side"),
    "async": ("async def f(): ...", "def f(): ...", "became `def f():"),
    "condition": ("if a:\n    f()", "if not a:\n    f()", "`a` became `not a`"),
    "split swap": (
        "def f(a, b):\n    a, b = b, a\n    return a, b",
        "def f(a, b):\n    a = b\n    b = a\n    return a, b",
        "`(a, b)` became `a`",
    ),
    "split before a method that may read": (
        "class C:\n    def f(self):\n        self.x, self.y = 1, self.g()",
        "class C:\n    def f(self):\n        self.x = 1\n        self.y = self.g()",
        "became `self.x`",
    ),
    "split with swapped values": ("a, b = 1, 2", "a = 2\nb = 1", "`1` became `2`"),
    "message": ('f("no such run")', 'f("no such job")', "the string 'no such run' became"),
    "message with a name of the table": (
        'f("The run told: no.")',
        'f("The run read_exit_code: no.")',
        "the string 'The run told: no.' became",
    ),
    "part of a formatted message": (
        'f(f"{x} told!")',
        'f(f"{x} asked!")',
        "the string ' told!' became",
    ),
    "expression in a formatted message": ('f(f"{x.a}")', 'f(f"{x.b}")', "the attribute a became b"),
    "format of a number": ('f(f"{x:.2f}")', 'f(f"{x:.3f}")', "the string '.2f' became '.3f'"),
    "hoisted string that is used twice": (
        'def f():\n    g("a")\n    g("a")',
        'def f():\n    text = "a"\n    g(text)\n    g(text)',
        "became `text = 'a'`",
    ),
    "hoisted string before an assertion": (
        'def f(x):\n    assert x, f"{x.y}"',
        'def f(x):\n    message = f"{x.y}"\n    assert x, message',
        "became `message = ",
    ),
    "end of a formatted message": ('f(f"{x}")', 'f(f"{x}{y}")', "became `f'{x}{y}'`"),
    "conversion": ('f(f"{x!r}")', 'f(f"{x!s}")', "conversion 114 became 115"),
    "bytes": ('f(b"told")', 'f(b"read_exit_code")', "`b'told'` became"),
    "import that is gone": ("import os\nf()", "f()", "the import of os is gone"),
    "import that is new": ("f()", "import os\nf()", "the import of os is new"),
    "import of another name": (
        "from os import path",
        "from os import sep",
        "the import of os.path is gone",
    ),
    "alias of an import": ("import os as a", "import os as b", "the import of os as a is gone"),
    "import for type checkers only": (
        "if TYPE_CHECKING:\n    import os",
        "import os\nif TYPE_CHECKING:\n    pass",
        "the import of os is gone",
    ),
    "import in another function": (
        "def f():\n    import os\ndef g():\n    pass",
        "def f():\n    pass\ndef g():\n    import os",
        "the import of os is gone",
    ),
    "name of another import": (
        "from os import path, sep\nf(path)",
        "from os import path, sep\nf(sep)",
        "path became sep here and path before",
    ),
    "new exported names": (
        'zero = 0\none = 1\n__all__ = ["zero"]',
        'zero = 0\none = 1\n__all__ = ["zero", "one"]',
        "__all__ has new names: one",
    ),
    "exported names": (
        FUNCTION + '__all__ = ["told"]',
        RENAMED_FUNCTION + '__all__ = ["told"]',
        "__all__ has no told",
    ),
    "syntax": ("f()", "f(", "no Python"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_catches(case: str, repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, expected_text = DIFFERENT[case]
    exit_code = _compare_module(repository, old, new)
    problem, summary = capsys.readouterr().out.splitlines()
    assert problem.startswith(f"{MODULE}: ")
    assert expected_text in problem
    assert summary == "3 modules: 2 equal, 0 listed as changed, 1 different, 0 missing"
    assert exit_code == 1


def test_says_both_lines(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    _compare_module(repository, "\n\nf(\n    1 + 2,\n)", "f(1 - 2)")
    assert f"{MODULE}: old line 4, new line 1: Add became Sub" in capsys.readouterr().out


# ---------------------------------------------------------------------- several modules

RUN = "rlhf_megatron/scheduler/run.py"
NEW_RUN = "rlhf_megatron/jobs/training_run.py"
USER = "rlhf_megatron/cli/commands.py"
FACADE = "rlhf_megatron/api.py"
MOVES = [(RUN, NEW_RUN)]
MOVED_RENAMES = [
    (RUN, "go", "start_training"),
    (RUN, "go(what)", "config_path"),
    (RUN, "Reached", "RunConnections"),
    (RUN, "Reached.of", "from_names"),
]
RUN_SOURCE = """
def go(what): ...

class Reached:
    def of(): ...
"""
NEW_RUN_SOURCE = """
def start_training(config_path): ...

class RunConnections:
    def from_names(): ...
"""
FACADE_SOURCE = "import os\nfrom rlhf_megatron.scheduler.run import Reached, go\n"
NEW_FACADE_SOURCE = (
    "import os\nfrom rlhf_megatron.jobs.training_run import RunConnections, start_training\n"
)

MOVED_SAME = {
    "import of a function": (
        "from rlhf_megatron.scheduler.run import go\ngo(what=1)",
        "from rlhf_megatron.jobs.training_run import start_training\nstart_training(config_path=1)",
    ),
    "import of a module": (
        "from rlhf_megatron.scheduler import run\nrun.go(what=run.Reached.of())",
        "from rlhf_megatron.jobs import training_run\n"
        "training_run.start_training(config_path=training_run.RunConnections.from_names())",
    ),
    "import of a dotted module": (
        "import rlhf_megatron.scheduler.run\nrlhf_megatron.scheduler.run.go(what=1)",
        "import rlhf_megatron.jobs.training_run\n"
        "rlhf_megatron.jobs.training_run.start_training(config_path=1)",
    ),
    "alias that stays": (
        "from rlhf_megatron.scheduler.run import go as begin\nbegin()",
        "from rlhf_megatron.jobs.training_run import start_training as begin\nbegin()",
    ),
    "alias that is the new name": (
        "from rlhf_megatron.scheduler.run import go as start_training\nstart_training()",
        "from rlhf_megatron.jobs.training_run import start_training\nstart_training()",
    ),
    "import through another module": (
        "from rlhf_megatron.api import go\ngo(what=1)",
        "from rlhf_megatron.api import start_training\nstart_training(config_path=1)",
    ),
    "module in a string": (
        'f("rlhf_megatron.scheduler.run")',
        'f("rlhf_megatron.jobs.training_run")',
    ),
    "function in a string": (
        'f("python -c from rlhf_megatron.scheduler.run.go")',
        'f("python -c from rlhf_megatron.jobs.training_run.start_training")',
    ),
    "module below the package in a string": (
        'f(f"see scheduler.run of {x}")',
        'f(f"see jobs.training_run of {x}")',
    ),
    "module and function in a string": (
        'f("rlhf_megatron.scheduler.run:go")',
        'f("rlhf_megatron.jobs.training_run:start_training")',
    ),
    "path in a string": (
        'f("rlhf_megatron/scheduler/run.py, or scheduler/run.py")',
        'f("rlhf_megatron/jobs/training_run.py, or jobs/training_run.py")',
    ),
    "relative module in a string": ('f(".local:go")', 'f(".local_commands:print_all")'),
    "string that stays": ('f("rlhf_megatron.scheduler")', 'f("rlhf_megatron.scheduler")'),
}
MOVED_DIFFERENT = {
    "import of the old name": (
        "from rlhf_megatron.scheduler.run import go",
        "from rlhf_megatron.jobs.training_run import go",
        "the import of rlhf_megatron.scheduler.run.go is gone",
    ),
    "import of another function": (
        "from rlhf_megatron.scheduler.run import go",
        "from rlhf_megatron.jobs.training_run import RunConnections",
        "the import of rlhf_megatron.scheduler.run.go is gone",
    ),
    "import of the old module": (
        "from rlhf_megatron.scheduler.run import go",
        "from rlhf_megatron.scheduler.run import start_training",
        "the import of rlhf_megatron.scheduler.run.go is gone",
    ),
    "attribute of a module": (
        "from rlhf_megatron.scheduler import run\nrun.go()",
        "from rlhf_megatron.jobs import training_run\ntraining_run.RunConnections()",
        "rlhf_megatron.scheduler.run.go became",
    ),
    "attribute of a class": (
        "from rlhf_megatron.scheduler import run\nrun.Reached.of()",
        "from rlhf_megatron.jobs import training_run\ntraining_run.RunConnections.of()",
        "rlhf_megatron.scheduler.run.Reached.of became",
    ),
    "attribute of a module outside, through another module": (
        "from rlhf_megatron.api import os\nos.go()",
        "from rlhf_megatron.api import os\nos.start_training()",
        "rlhf_megatron.api.os.go became",
    ),
    "two imports that have two names": (
        "if A:\n    from rlhf_megatron.api import go\n"
        "else:\n    from rlhf_megatron.scheduler.run import go as go",
        "if A:\n    from rlhf_megatron.api import start_training\n"
        "else:\n    from rlhf_megatron.jobs.training_run import start_training as go",
        "go is imported as start_training and as go",
    ),
    "swapped imports": (
        "from rlhf_megatron.scheduler.run import Reached, go\nf(Reached, go)",
        "from rlhf_megatron.jobs.training_run import RunConnections, start_training\n"
        "f(start_training, RunConnections)",
        "Reached became start_training here and RunConnections before",
    ),
    "keyword": (
        "from rlhf_megatron.api import go\ngo(what=1)",
        "from rlhf_megatron.api import start_training\nstart_training(what=1)",
        "the keyword what became what",
    ),
    "module in a string": (
        'f("rlhf_megatron.scheduler.run")',
        'f("rlhf_megatron.api")',
        "the string 'rlhf_megatron.scheduler.run' became",
    ),
    "function in a string": (
        'f("rlhf_megatron.scheduler.run:go")',
        'f("rlhf_megatron.jobs.training_run:RunConnections")',
        "the string 'rlhf_megatron.scheduler.run:go' became",
    ),
    "path in a string": (
        'f("scheduler/run.py")',
        'f("scheduler/training_run.py")',
        "the string 'scheduler/run.py'",
    ),
}


def _compare_user(repository: Repository, old: str, new: str) -> int:
    """Compare a module that uses one that moved."""
    local = "rlhf_megatron/cli/local.py"
    new_local = "rlhf_megatron/cli/local_commands.py"
    return repository.compare(
        {RUN: RUN_SOURCE, FACADE: FACADE_SOURCE, local: "def go(): ...", USER: old},
        {
            NEW_RUN: NEW_RUN_SOURCE,
            FACADE: NEW_FACADE_SOURCE,
            new_local: "def print_all(): ...",
            USER: new,
        },
        moves=[*MOVES, (local, new_local)],
        renames=[*MOVED_RENAMES, (local, "go", "print_all")],
    )


@pytest.mark.parametrize("case", MOVED_SAME)
def test_lets_moves_pass(
    case: str, repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = MOVED_SAME[case]
    exit_code = _compare_user(repository, old, new)
    assert (
        capsys.readouterr().out
        == "5 modules: 5 equal, 0 listed as changed, 0 different, 0 missing\n"
    )
    assert exit_code == 0


@pytest.mark.parametrize("case", MOVED_DIFFERENT)
def test_catches_with_moves(
    case: str, repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, expected_text = MOVED_DIFFERENT[case]
    exit_code = _compare_user(repository, old, new)
    problem, summary = capsys.readouterr().out.splitlines()
    assert problem.startswith(f"{USER}: ")
    assert expected_text in problem
    assert summary == "5 modules: 4 equal, 0 listed as changed, 1 different, 0 missing"
    assert exit_code == 1


def test_public_name_stays_by_an_explicit_alias(repository: Repository) -> None:
    exit_code = repository.compare(
        {RUN: RUN_SOURCE, FACADE: "from rlhf_megatron.scheduler.run import go as go"},
        {
            NEW_RUN: NEW_RUN_SOURCE,
            FACADE: "from rlhf_megatron.jobs.training_run import start_training as go",
        },
        moves=MOVES,
        renames=MOVED_RENAMES,
    )
    assert exit_code == 0


# ---------------------------------------------------------------------- tables and the report


def test_missing_module(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = repository.compare({RUN: RUN_SOURCE}, {}, moves=MOVES)
    problem, summary = capsys.readouterr().out.splitlines()
    assert problem == f"{NEW_RUN}: missing; it was {RUN}"
    assert summary == "2 modules: 1 equal, 0 listed as changed, 0 different, 1 missing"
    assert exit_code == 1


def test_new_module(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = repository.compare({}, {RUN: "f()", OTHER_MODULE: '"""No code."""'})
    problem, summary = capsys.readouterr().out.splitlines()
    assert problem.startswith(f"{RUN}: the module is new")
    assert summary == "2 modules: 1 equal, 0 listed as changed, 1 different, 0 missing"
    assert exit_code == 1


LISTED = [(NEW_RUN, "2,4", "waits no longer"), (OTHER_MODULE, "4", "is new")]
LISTED_LINES = [
    f"{OTHER_MODULE}: listed as changed (point 4): is new",
    f"{NEW_RUN}: listed as changed (point 2, 4): waits no longer",
]
LISTED_SUMMARY = (
    "3 modules: 1 equal, 2 listed as changed (points 2: 1, 4: 2), 0 different, 0 missing"
)


@pytest.mark.parametrize(
    ("options", "expected_lines"),
    [([], [LISTED_SUMMARY]), (["--list"], [*LISTED_LINES, LISTED_SUMMARY])],
    ids=["summary", "list"],
)
def test_listed_modules_may_differ(
    options: list[str],
    expected_lines: list[str],
    repository: Repository,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = {NEW_RUN: "wait(0)", OTHER_MODULE: "f()"}
    exit_code = repository.compare(
        {RUN: "wait(1)"}, new, moves=MOVES, changed_modules=LISTED, options=options
    )
    assert capsys.readouterr().out.splitlines() == expected_lines
    assert exit_code == 0


@pytest.mark.parametrize(
    ("table", "row", "expected_problem"),
    [
        (
            "changed_modules",
            (NEW_RUN, "3", "none"),
            f"{NEW_RUN}: listed as changed (point 3), but equal; remove its row",
        ),
        (
            "changed_modules",
            ("rlhf_megatron/gone.py", "3", "none"),
            "rlhf_megatron/gone.py: listed in",
        ),
        (
            "moves",
            ("rlhf_megatron/never.py", "rlhf_megatron/there.py"),
            "rlhf_megatron/never.py: in docs/dev/moves.tsv",
        ),
        (
            "renames",
            ("rlhf_megatron/never.py", "f", "g"),
            "rlhf_megatron/never.py: in docs/dev/renames.tsv",
        ),
    ],
    ids=["equal module", "no module", "move of no module", "rename in no module"],
)
def test_stale_rows(
    table: str,
    row: tuple[str, ...],
    expected_problem: str,
    repository: Repository,
    capsys: pytest.CaptureFixture[str],
) -> None:
    repository.compare(
        {RUN: RUN_SOURCE}, {NEW_RUN: NEW_RUN_SOURCE}, moves=MOVES, renames=MOVED_RENAMES
    )
    assert (
        capsys.readouterr().out
        == "2 modules: 2 equal, 0 listed as changed, 0 different, 0 missing\n"
    )
    rows: dict[str, Sequence[Sequence[str]]] = {
        "moves": MOVES,
        "renames": MOVED_RENAMES,
        "changed_modules": [],
    }
    repository.write_table(table, [*rows[table], row])
    exit_code = main(["--base", "HEAD"])
    assert capsys.readouterr().out.startswith(expected_problem)
    assert exit_code == 1


@pytest.mark.parametrize(
    ("table", "rows", "expected_error"),
    [
        ("moves", [("rlhf_megatron/a.py",)], "1 columns, must be 2"),
        ("renames", [(RUN, "go", "start training")], "must be an identifier"),
        ("changed_modules", [(RUN, "2", "a"), (RUN, "3", "b")], "has two rows"),
    ],
    ids=["columns", "identifier", "two rows"],
)
def test_tables_that_cannot_be_read(
    table: str,
    rows: list[tuple[str, ...]],
    expected_error: str,
    repository: Repository,
    capsys: pytest.CaptureFixture[str],
) -> None:
    repository.compare({}, {})
    repository.write_table(table, rows)
    exit_code = main(["--base", "HEAD"])
    assert expected_error in capsys.readouterr().err
    assert exit_code == 2


def test_unknown_commit(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.compare({}, {})
    assert main(["--base", "no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err
