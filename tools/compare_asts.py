"""Show that a large rename changed names only: `python -m tools.compare_asts --base f0d5176`.

Run it in the root of the repository. It parses every module of the package as it was at the base
commit and as it is in the working tree, and walks both syntax trees side by side. Three tables in
docs/dev say what may differ:

- moves.tsv (old path, new path): the modules that moved;
- renames.tsv (old path, old qualified name, new name): what was renamed;
- changed_modules.tsv (new path, points, reason): the modules whose code changed beyond names. They
  must differ, and are not compared; `--list` prints them.

These are no differences: docstrings and other strings that stand alone as a statement, `pass`, the
order of imports in a scope, `a, b = x, y` against `a = x` and `b = y`, the way in which a string is
put together out of literal parts, and a string that a local variable holds for the next statement.

A variable is compared by its binding: names map one to one in each scope, so that swapped arguments
are found even where both names are in the table. The type of an object is not known: an attribute
of anything but `self`, a module or a class, and a keyword of a call of anything but a function or
class that can be looked up, may change as any row of the table says. So may a string that holds
nothing but identifiers.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn, TypeAlias

PACKAGE = "rlhf_megatron"
MOVES = "docs/dev/moves.tsv"
RENAMES = "docs/dev/renames.tsv"
CHANGED_MODULES = "docs/dev/changed_modules.tsv"

STATEMENT_LISTS = ("body", "orelse", "finalbody")
UNCOMPARED_FIELDS = {"ctx", "kind", "type_comment", "type_ignores"}
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
DOTTED_IDENTIFIER = r"\.?[A-Za-z_]\w*(?:[.:][A-Za-z_]\w*)*"
LIST_OF_IDENTIFIERS = re.compile(rf"{DOTTED_IDENTIFIER}(?:[\s,|\[\]]+{DOTTED_IDENTIFIER})*[\s,\]]*")
"""Names as in `"a, b"`, `"a.b"`, `".module:function"` and `"Sequence[a] | b"`."""
STRING_TOKEN = re.compile(r"\.?[A-Za-z_]\w*(?:[./]\w+)*(?::[A-Za-z_]\w*)?")
"""A name, a dotted name or a path, with `:function` behind it or without."""
TEXT_WIDTH = 60  # characters of code in a message

Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
SIMPLE_STATEMENTS = (
    ast.AnnAssign,
    ast.Assert,
    ast.Assign,
    ast.AugAssign,
    ast.Delete,
    ast.Expr,
    ast.Raise,
    ast.Return,
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
CONDITIONAL_EXPRESSIONS = (ast.Assert, ast.BoolOp, ast.IfExp)


# ---------------------------------------------------------------------- tables


class TableError(ValueError):
    """A table that cannot be read, or that contradicts the repository."""


@dataclass(frozen=True)
class ChangedModule:
    """A row of changed_modules.tsv."""

    path: str
    points: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class RenameTables:
    """What the three tables say."""

    new_paths: Mapping[str, str]  # by old path; of modules that moved
    new_names: Mapping[tuple[str, str], frozenset[str]]  # by old path and old qualified name
    changed_modules: Mapping[str, ChangedModule]  # by new path
    name_pairs: frozenset[tuple[str, str]]  # (old, new) last components of all rows
    name_pairs_by_path: Mapping[str, frozenset[tuple[str, str]]]
    module_name_pairs: frozenset[tuple[str, str]]  # the same of modules

    def new_path(self, old_path: str) -> str:
        """Return where a module of the base commit is today."""
        return self.new_paths.get(old_path, old_path)

    def allows_pair(self, old_name: str, new_name: str) -> bool:
        """Tell whether any row of the table renames something of this name to the new name."""
        return old_name == new_name or (old_name, new_name) in self.name_pairs


def read_tables(root: Path) -> RenameTables:
    """Read the three tables below the root of the repository."""
    new_paths = dict(_read_rows(root / MOVES, num_columns=2))
    new_names: dict[tuple[str, str], frozenset[str]] = {}
    pairs_by_path: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path, qualified_name, new_name in _read_rows(root / RENAMES, num_columns=3):
        if qualified_name == "<module>":
            continue
        if not new_name.isidentifier():
            raise TableError(
                f"{RENAMES}: {new_name!r}, for {qualified_name} of {path}, must be an identifier."
            )
        key = (path, qualified_name)
        new_names[key] = new_names.get(key, frozenset()) | {new_name}
        pairs_by_path[path].add((last_component(qualified_name), new_name))
    changed_modules: dict[str, ChangedModule] = {}
    for path, points, reason in _read_rows(root / CHANGED_MODULES, num_columns=3):
        if path in changed_modules:
            raise TableError(f"{CHANGED_MODULES}: {path} has two rows; join them.")
        changed_modules[path] = ChangedModule(
            path, tuple(points.replace(" ", "").split(",")), reason
        )
    module_pairs = {
        (dotted_module(old).rpartition(".")[2], dotted_module(new).rpartition(".")[2])
        for old, new in new_paths.items()
    }
    return RenameTables(
        new_paths=new_paths,
        new_names=new_names,
        changed_modules=changed_modules,
        name_pairs=frozenset().union(*pairs_by_path.values()),
        name_pairs_by_path={path: frozenset(pairs) for path, pairs in pairs_by_path.items()},
        module_name_pairs=frozenset(module_pairs),
    )


def _read_rows(path: Path, num_columns: int) -> Iterator[list[str]]:
    """Yield the cells of each row of a table, without its header, empty lines and lines of `#`."""
    if not path.is_file():
        raise TableError(f"{path} is missing.")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = [cell.strip() for cell in line.split("\t")]
        is_header = number == 1 and not cells[0].endswith(".py")
        if is_header:
            continue
        if len(cells) != num_columns:
            raise TableError(
                f"{path}:{number}: {len(cells)} columns, must be {num_columns}: {line!r}"
            )
        yield cells


def last_component(qualified_name: str) -> str:
    """Return the name that a qualified name ends in: `b` of `a.b`, and `x` of `a.b(x)`."""
    if qualified_name.endswith(")"):
        return qualified_name.rpartition("(")[2].removesuffix(")")
    return qualified_name.rpartition(".")[2]


def dotted_module(path: str) -> str:
    """Return the dotted name by which the module at a path is imported."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# ---------------------------------------------------------------------- normal form


def parse_normalised(source: str | bytes) -> ast.Module:
    """Parse a module and take out of its tree what may differ freely."""
    tree = ast.parse(source)
    normalised = _Normaliser().visit(tree)
    assert isinstance(normalised, ast.Module), "the normaliser keeps the module"
    return normalised


class _Normaliser(ast.NodeTransformer):
    """Drops strings that stand alone, splits assignments of tuples, and joins strings."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field_name in STATEMENT_LISTS:
            statements = getattr(node, field_name, None)
            if isinstance(statements, list):
                setattr(node, field_name, _normalise_statements(statements))
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        self.generic_visit(node)
        return _join_strings(node, [node])

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        is_concatenation = (
            isinstance(node.op, ast.Add) and _is_string(node.left) and _is_string(node.right)
        )
        return _join_strings(node, [node.left, node.right]) if is_concatenation else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        _inline_strings(node)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        self.generic_visit(node)
        _inline_strings(node)
        return node


def _normalise_statements(statements: list[ast.stmt]) -> list[ast.stmt]:
    normalised: list[ast.stmt] = []
    for statement in statements:
        is_lone_string = (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        )
        if is_lone_string or isinstance(statement, ast.Pass):
            continue
        if isinstance(statement, ast.Assign):
            normalised += _split_assignment(statement)
        else:
            normalised.append(statement)
    return normalised


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _join_strings(location: ast.expr, strings: Iterable[ast.expr]) -> ast.expr:
    """Return one string of several: a constant where nothing is formatted in."""
    parts: list[ast.expr] = []
    for string in strings:
        for part in string.values if isinstance(string, ast.JoinedStr) else [string]:
            if not isinstance(part, ast.Constant):
                parts.append(part)
                continue
            previous = parts[-1] if parts else None
            if isinstance(previous, ast.Constant):
                joined = ast.Constant(str(previous.value) + str(part.value))
                parts[-1] = ast.copy_location(joined, previous)
            elif part.value:
                parts.append(part)
    if not parts:
        return ast.copy_location(ast.Constant(""), location)
    if len(parts) == 1 and isinstance(parts[0], ast.Constant):
        return ast.copy_location(parts[0], location)
    return ast.copy_location(ast.JoinedStr(parts), location)


def _split_assignment(statement: ast.Assign) -> list[ast.stmt]:
    """Return an assignment of a tuple to a tuple as assignments of one value each.

    Values stay together where a later one may read what an earlier target is set to, as in
    `a, b = b, a`.
    """
    target = statement.targets[0]
    value = statement.value
    if len(statement.targets) != 1 or not isinstance(target, ast.Tuple | ast.List):
        return [statement]
    if not isinstance(value, ast.Tuple | ast.List) or len(target.elts) != len(value.elts):
        return [statement]
    if any(isinstance(element, ast.Starred) for element in [*target.elts, *value.elts]):
        return [statement]
    pairs = list(zip(target.elts, value.elts, strict=True))
    groups: list[list[tuple[ast.expr, ast.expr]]] = []
    for index, pair in enumerate(pairs):
        later_values = [later for _, later in pairs[index:]]
        can_split = not any(
            _may_read(later, earlier) for earlier, _ in pairs[:index] for later in later_values
        )
        if index == 0 or can_split:
            groups.append([pair])
        else:
            groups[-1].append(pair)
    split: list[ast.stmt] = []
    for group in groups:
        first_target, first_value = group[0]
        if len(group) == 1:
            single = ast.copy_location(ast.Assign([first_target], first_value), first_target)
            split += _split_assignment(single)
        else:
            targets = ast.copy_location(
                ast.Tuple([element for element, _ in group], ast.Store()), first_target
            )
            values = ast.copy_location(
                ast.Tuple([element for _, element in group], ast.Load()), first_value
            )
            split.append(ast.copy_location(ast.Assign([targets], values), first_target))
    return split


def _may_read(value: ast.expr, target: ast.expr) -> bool:
    """Tell whether evaluating a value may read what an assignment to the target sets.

    `self.a` is read by `self.a`, and may be read by a method of `self` and by a function that gets
    `self` as an argument.
    """
    if isinstance(target, ast.Tuple | ast.List):
        return any(_may_read(value, element) for element in target.elts)
    if isinstance(target, ast.Name):
        return any(isinstance(node, ast.Name) and node.id == target.id for node in ast.walk(value))
    if not isinstance(target, ast.Attribute | ast.Subscript):
        return True
    if _has_call(target) and _has_call(value):
        return True
    texts_of_target = {ast.unparse(target)}
    owner = target.value
    if isinstance(target, ast.Subscript):
        texts_of_target.add(ast.unparse(owner))
    texts_of_owners = {ast.unparse(owner)}
    while isinstance(owner, ast.Attribute | ast.Subscript):
        owner = owner.value
        texts_of_owners.add(ast.unparse(owner))
    harmless = _read_only_for_attribute(value)
    for node in ast.walk(value):
        if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            continue
        text = ast.unparse(node)
        if text in texts_of_target or (text in texts_of_owners and id(node) not in harmless):
            return True
    return False


def _has_call(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Call | ast.Await) for inner in ast.walk(node))


def _read_only_for_attribute(value: ast.expr) -> set[int]:
    """Return the ids of the nodes of which an attribute is read that is not called."""
    called = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
    attributes = (
        node for node in ast.walk(value) if isinstance(node, ast.Attribute | ast.Subscript)
    )
    return {id(node.value) for node in attributes if id(node) not in called}


def _inline_strings(function: Function) -> None:
    """Put a string that a local variable holds for the next statement only into that statement."""
    num_uses = Counter(_identifiers(function))
    for node in ast.walk(function):
        for field_name in STATEMENT_LISTS:
            statements = getattr(node, field_name, None)
            if not isinstance(statements, list):
                continue
            for index in reversed(range(len(statements) - 1)):
                inlined = _inline_string(statements[index], statements[index + 1], num_uses)
                if inlined is not None:
                    statements[index : index + 2] = [inlined]


def _identifiers(function: Function) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                yield name
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from names
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield name


def _inline_string(
    statement: ast.stmt, following: ast.stmt, num_uses: Mapping[str, int]
) -> ast.stmt | None:
    """Return the following statement with the string in it, if it can be there."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
            _is_string(value) and num_uses[name] == 2
        ):
            pass
        case _:
            return None
    if not isinstance(following, SIMPLE_STATEMENTS):
        return None
    replacer = _NameReplacer(name, value)
    replacer.visit(following)
    if not replacer.is_replaced:
        return None
    inlined = _Normaliser().visit(following)
    assert isinstance(inlined, ast.stmt), "the normaliser keeps a statement"
    return inlined


class _NameReplacer(ast.NodeTransformer):
    """Replaces a name by a string where this is evaluated at the same time.

    What is formatted into a string may fail, so that it is not put where it might not be evaluated.
    """

    def __init__(self, name: str, value: ast.expr) -> None:
        self.name = name
        self.value = value
        self.is_replaced = False

    def visit(self, node: ast.AST) -> ast.AST:
        is_later = isinstance(node, (ast.Lambda, *COMPREHENSIONS))
        is_conditional = isinstance(node, CONDITIONAL_EXPRESSIONS) and isinstance(
            self.value, ast.JoinedStr
        )
        if is_later or is_conditional:
            return node
        if isinstance(node, ast.Name) and node.id == self.name and isinstance(node.ctx, ast.Load):
            self.is_replaced = True
            return self.value
        self.generic_visit(node)
        return node


# ---------------------------------------------------------------------- scopes


@dataclass(frozen=True)
class ImportedName:
    """A name that an import statement binds."""

    dotted_name: str  # absolute; of what is imported
    bound_name: str  # dotted; of what the local name stands for: `a` of `import a.b`
    local_name: str
    has_alias: bool  # is written with `as`
    guards: str  # the statements around it, up to the scope: "If.body"
    line: int

    @property
    def binds_first_name(self) -> bool:
        """Tell whether the import is of the form `import a.b`, which binds `a`."""
        return self.bound_name != self.dotted_name


@dataclass
class Scope:
    """The names that a module, class, function, lambda or comprehension binds."""

    kind: str  # "module", "class", "function", "lambda" or "comprehension"
    qualified_name: str  # of the function or class, "" of the module
    # name: "parameter", "definition", "variable", "import"
    kinds: dict[str, str] = field(default_factory=dict)
    imported_names: list[ImportedName] = field(default_factory=list)
    global_names: set[str] = field(default_factory=set)
    nonlocal_names: set[str] = field(default_factory=set)
    receiver: str | None = None  # the first parameter of a method: `self` or `cls`

    def bound_name(self, local_name: str) -> str | None:
        """Return the dotted name that an imported name stands for; None if there are several."""
        bound_names = {
            name.bound_name for name in self.imported_names if name.local_name == local_name
        }
        return bound_names.pop() if len(bound_names) == 1 else None


def read_module_scope(tree: ast.Module, module_name: str, is_package: bool) -> Scope:
    """Return the scope of a module. A name that a function declares as global belongs to it."""
    scope = Scope("module", "")
    reader = _ScopeReader(scope, module_name if is_package else module_name.rpartition(".")[0])
    reader.read(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            for name in node.names:
                scope.kinds.setdefault(name, "variable")
    return scope


def read_class_scope(node: ast.ClassDef, qualified_name: str, package: str) -> Scope:
    """Return the scope of the body of a class."""
    scope = Scope("class", qualified_name)
    _ScopeReader(scope, package).read(node.body)
    return scope


def read_function_scope(
    node: Function, qualified_name: str, package: str, is_method: bool
) -> Scope:
    """Return the scope of the body of a function."""
    scope = Scope("function", qualified_name)
    scope.kinds.update((parameter.arg, "parameter") for parameter in parameters_of(node.args))
    positional = [*node.args.posonlyargs, *node.args.args]
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if is_method and positional and "staticmethod" not in decorators:
        scope.receiver = positional[0].arg
    _ScopeReader(scope, package).read(node.body)
    return scope


def read_lambda_scope(node: ast.Lambda, qualified_name: str, package: str) -> Scope:
    """Return the scope of a lambda; it has the qualified name of the function around it."""
    scope = Scope("lambda", qualified_name)
    scope.kinds.update((parameter.arg, "parameter") for parameter in parameters_of(node.args))
    _ScopeReader(scope, package).read([node.body])
    return scope


def read_comprehension_scope(node: Comprehension, qualified_name: str, package: str) -> Scope:
    """Return the scope of a comprehension; it has the qualified name of the function around it."""
    scope = Scope("comprehension", qualified_name)
    _ScopeReader(scope, package).read([generator.target for generator in node.generators])
    return scope


def parameters_of(arguments: ast.arguments) -> list[ast.arg]:
    """Return all parameters of a function in a fixed order."""
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters += [
        parameter for parameter in (arguments.vararg, arguments.kwarg) if parameter is not None
    ]
    return parameters


class _ScopeReader(ast.NodeVisitor):
    """Notes what a scope binds, without what the scopes inside bind."""

    def __init__(self, scope: Scope, package: str) -> None:
        self.scope = scope
        self.package = package  # in which relative imports start
        self.guards: list[str] = []

    def read(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        for field_name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            is_guard = isinstance(
                node, ast.stmt | ast.ExceptHandler | ast.match_case
            ) and isinstance(value, list)
            if is_guard:
                self.guards.append(f"{type(node).__name__}.{field_name}")
            self.read(child for child in children if isinstance(child, ast.AST))
            if is_guard:
                self.guards.pop()

    def _bind(self, name: str | None, kind: str) -> None:
        if name is not None:
            self.scope.kinds.setdefault(name, kind)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._bind(node.id, "variable")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def _visit_function(self, node: Function) -> None:
        self._bind(node.name, "definition")
        self.read(node.decorator_list)
        self.visit(node.args)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name, "definition")
        self.read([*node.decorator_list, *node.bases, *node.keywords])

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._visit_comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._visit_comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._visit_comprehension(node)

    def _visit_comprehension(self, node: Comprehension) -> None:
        """Note what `:=` inside binds: it binds in the scope around the comprehension."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                self.visit(inner.target)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._bind(node.name, "variable")
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._bind(node.name, "variable")
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._bind(node.name, "variable")

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self._bind(node.rest, "variable")
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.scope.global_names.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.scope.nonlocal_names.update(node.names)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            bound_name = alias.name if alias.asname else alias.name.partition(".")[0]
            self._import(node, alias, alias.name, bound_name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        origin = node.module or ""
        if node.level:
            parts = self.package.split(".")
            origin = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
        for alias in node.names:
            dotted_name = f"{origin}.{alias.name}"
            self._import(node, alias, dotted_name, dotted_name)

    def _import(self, node: ast.stmt, alias: ast.alias, dotted_name: str, bound_name: str) -> None:
        local_name = alias.asname or bound_name.rpartition(".")[2]
        self._bind(local_name, "import")
        self.scope.imported_names.append(
            ImportedName(
                dotted_name=dotted_name,
                bound_name=bound_name,
                local_name=local_name,
                has_alias=alias.asname is not None,
                guards=" ".join(self.guards),
                line=node.lineno,
            )
        )


# ---------------------------------------------------------------------- package


@dataclass(frozen=True)
class OldModule:
    """A module of the base commit."""

    path: str
    dotted_name: str
    new_dotted_name: str
    tree: ast.Module
    scope: Scope
    definitions: frozenset[str]  # qualified names of functions, classes and annotated fields


@dataclass(frozen=True)
class Definition:
    """What a name of the base commit stands for: a module, class, function or something in one."""

    module: OldModule | None  # None: something outside of the package
    qualified_name: str  # "" of a module

    def member(self, name: str) -> Definition:
        """Return what an attribute stands for."""
        return Definition(self.module, f"{self.qualified_name}.{name}".removeprefix("."))


class OldPackage:
    """The modules of the base commit, and what becomes of a dotted name in them."""

    def __init__(self, sources: Mapping[str, bytes], tables: RenameTables) -> None:
        self.tables = tables
        self.modules: dict[str, OldModule] = {}  # by dotted name
        self.folders = {
            path.rpartition("/")[0] for path in sources if path.endswith("/__init__.py")
        }
        for path, source in sources.items():
            tree = parse_normalised(source)
            dotted_name = dotted_module(path)
            self.modules[dotted_name] = OldModule(
                path=path,
                dotted_name=dotted_name,
                new_dotted_name=dotted_module(tables.new_path(path)),
                tree=tree,
                scope=read_module_scope(tree, dotted_name, path.endswith("/__init__.py")),
                definitions=frozenset(_qualified_definitions(tree, "")),
            )

    def split(self, dotted_name: str) -> tuple[OldModule, list[str]] | None:
        """Return the module that a dotted name begins with, and the names behind it.

        Return None for a name outside of the package.
        """
        parts = dotted_name.split(".")
        for length in range(len(parts), 0, -1):
            module = self.modules.get(".".join(parts[:length]))
            if module is not None:
                return module, parts[length:]
        return None

    def is_same(self, old_dotted_name: str, new_dotted_name: str) -> bool:
        """Tell whether the new dotted name is the old one after all moves and renames."""
        split = self.split(old_dotted_name)
        if split is None:
            return old_dotted_name == new_dotted_name
        module, old_parts = split
        prefix = f"{module.new_dotted_name}." if old_parts else module.new_dotted_name
        new_parts = new_dotted_name.removeprefix(prefix).split(".") if old_parts else []
        if not new_dotted_name.startswith(prefix) or len(new_parts) != len(old_parts):
            return False
        if not old_parts:
            return new_dotted_name == prefix
        return all(
            self.allows_member(self.find_definition(module, old_parts[:index]), old, new)
            for index, (old, new) in enumerate(zip(old_parts, new_parts, strict=True))
        )

    def allows_member(self, owner: Definition | None, old_name: str, new_name: str) -> bool:
        """Tell whether an attribute of something may get the new name; of None, any row allows."""
        if owner is None:
            return self.tables.allows_pair(old_name, new_name)
        if owner.module is None:
            return old_name == new_name
        if owner.qualified_name:
            key = (owner.module.path, owner.member(old_name).qualified_name)
            expected_names: Collection[str] | None = self.tables.new_names.get(key)
        else:
            expected_names = self._expected_top_names(owner.module, old_name, set())
        if expected_names is None:
            return self.tables.allows_pair(old_name, new_name)
        return new_name in expected_names

    def _expected_top_names(
        self, module: OldModule, name: str, visited: set[tuple[str, str]]
    ) -> set[str] | None:
        """Return the names that a name of a module's top level may have now.

        Return None if the module does not bind the old name.
        """
        exact_names = self.tables.new_names.get((module.path, name))
        if exact_names is not None:
            return set(exact_names)
        if name not in module.scope.kinds or (module.path, name) in visited:
            return None
        visited.add((module.path, name))
        if module.scope.kinds[name] != "import":
            return {name}
        expected_names: set[str] = set()
        for imported in module.scope.imported_names:
            if imported.local_name != name:
                continue
            if imported.has_alias:
                expected_names.add(name)
            split = self.split(imported.dotted_name)
            if split is None:
                expected_names.add(name)
            elif not split[1]:
                expected_names.add(split[0].new_dotted_name.rpartition(".")[2])
            else:
                origin, parts = split
                expected_names |= self._expected_top_names(origin, parts[0], visited) or {name}
        return expected_names

    def find_definition(self, module: OldModule, parts: Sequence[str]) -> Definition | None:
        """Return what a dotted name stands for in a module, looked up through imports.

        Return None if that is not clear.
        """
        visited: set[tuple[str, str]] = set()
        while parts and module.scope.kinds.get(parts[0]) == "import":
            bound_name = module.scope.bound_name(parts[0])
            if bound_name is None or (module.path, parts[0]) in visited:
                return None
            visited.add((module.path, parts[0]))
            split = self.split(bound_name)
            if split is None:
                return Definition(None, ".".join([bound_name, *parts[1:]]))
            module = split[0]
            parts = [*split[1], *parts[1:]]
        return Definition(module, ".".join(parts))

    def expected_keywords(self, owner: Definition | None, keyword: str) -> Collection[str] | None:
        """Return what a keyword of a call may be now; None if any row of the table allows it."""
        module = owner.module if owner is not None else None
        if owner is None or module is None:
            return None
        new_names = self.tables.new_names
        for function in (owner, owner.member("__init__"), owner.member("__new__")):
            parameter = f"{function.qualified_name}({keyword})"
            if (module.path, parameter) in new_names:
                return new_names[module.path, parameter]
            if parameter in module.definitions:
                is_method = function is owner and "." in owner.qualified_name
                return None if is_method else {keyword}
        is_field = owner.member(keyword).qualified_name in module.definitions
        has_initializer = owner.member("__init__").qualified_name in module.definitions
        if is_field and not has_initializer:
            return new_names.get((module.path, owner.member(keyword).qualified_name))
        return None


def _qualified_definitions(node: ast.AST, prefix: str) -> Iterator[str]:
    """Yield the qualified names of functions, parameters, classes and annotated fields."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name
            yield from _qualified_definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name
            yield from (
                f"{prefix}{child.name}({parameter.arg})" for parameter in parameters_of(child.args)
            )
            yield from _qualified_definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield prefix + child.target.id
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _qualified_definitions(child, prefix)


# ---------------------------------------------------------------------- comparison


class DifferenceFound(Exception):
    """Raised at the first difference of two modules."""


@dataclass
class ScopePair:
    """A scope of the old module and the scope of the new module at the same place."""

    old: Scope
    new: Scope
    new_names: dict[str, str] = field(default_factory=dict)  # by old name
    old_names: dict[str, str] = field(default_factory=dict)  # by new name


class ModuleComparison:
    """Walks the old and the new tree of a module, up to the first difference that counts."""

    def __init__(self, package: OldPackage, old_module: OldModule, new_path: str) -> None:
        self.package = package
        self.tables = package.tables
        self.old_module = old_module
        self.new_path = new_path
        self.old_parent = _package_name(old_module.path)
        self.new_parent = _package_name(new_path)
        self.scopes: list[ScopePair] = []
        self.old_line = 1
        self.new_line = 1
        self.module_pairs = self.tables.name_pairs_by_path.get(old_module.path, frozenset())

    def compare_module(self, new_tree: ast.Module) -> None:
        """Compare the whole module."""
        is_package = self.new_path.endswith("/__init__.py")
        new_scope = read_module_scope(new_tree, dotted_module(self.new_path), is_package)
        self._enter(self.old_module.scope, new_scope)
        self._compare_statements(self.old_module.tree.body, new_tree.body)

    def _fail(self, reason: str) -> NoReturn:
        raise DifferenceFound(f"old line {self.old_line}, new line {self.new_line}: {reason}")

    # scopes and bindings

    def _enter(self, old: Scope, new: Scope) -> None:
        """Make two scopes the innermost ones and compare what they import."""
        pair = ScopePair(old, new)
        self.scopes.append(pair)
        self._compare_imports(pair)

    def _resolve(self, name: str, scopes: Sequence[Scope]) -> int | None:
        """Return the index of the scope that a name belongs to; None if it is a builtin name."""
        for index in reversed(range(len(scopes))):
            scope = scopes[index]
            is_innermost = index == len(scopes) - 1
            if scope.kind == "class" and not is_innermost:
                continue
            if name in scope.global_names:
                return 0
            if name in scope.kinds and name not in scope.nonlocal_names:
                return index
        return None

    def _resolve_old(self, name: str) -> int | None:
        return self._resolve(name, [pair.old for pair in self.scopes])

    def _resolve_new(self, name: str) -> int | None:
        return self._resolve(name, [pair.new for pair in self.scopes])

    def _compare_name(self, old_name: str, new_name: str) -> None:
        """Compare a use or a definition of a variable."""
        old_index = self._resolve_old(old_name)
        new_index = self._resolve_new(new_name)
        if old_index != new_index:
            self._fail(f"{old_name} and {new_name} belong to different scopes")
        if old_index is None:
            if old_name != new_name:
                self._fail(f"the builtin name {old_name} became {new_name}")
            return
        self._bind(self.scopes[old_index], old_name, new_name)

    def _bind(self, pair: ScopePair, old_name: str, new_name: str) -> None:
        """Note the new name of a name in a scope, and check that it is allowed and the only one."""
        known_new_name = pair.new_names.get(old_name)
        if known_new_name == new_name:
            return
        if known_new_name is not None:
            self._fail(f"{old_name} became {new_name} here and {known_new_name} before")
        known_old_name = pair.old_names.get(new_name)
        if known_old_name is not None:
            self._fail(f"{old_name} became {new_name}, as {known_old_name} did before")
        self._check_binding(pair.old, old_name, new_name)
        pair.new_names[old_name] = new_name
        pair.old_names[new_name] = old_name

    def _check_binding(self, scope: Scope, old_name: str, new_name: str) -> None:
        """Fail unless the table of renames gives this new name to a name that a scope binds."""
        kind = scope.kinds.get(old_name, "attribute")
        qualified_name = self._qualified_name(scope, old_name, kind)
        exact_names = self.tables.new_names.get((self.old_module.path, qualified_name))
        if exact_names is not None and scope.kind in ("module", "class", "function"):
            if new_name not in exact_names:
                expected = " or ".join(sorted(exact_names))
                self._fail(
                    f"{qualified_name} must be {expected} after {RENAMES}, and is {new_name}"
                )
            return
        if old_name == new_name:
            return
        is_module_level = scope.kind == "module" or (
            scope.kind == "function" and kind == "parameter" and "." not in scope.qualified_name
        )
        if is_module_level:
            self._fail(f"{qualified_name} became {new_name}, and {RENAMES} has no row for it")
        is_shared = scope.kind == "class" or (scope.kind == "function" and kind == "parameter")
        if is_shared and not self.tables.allows_pair(old_name, new_name):
            self._fail(f"{qualified_name} became {new_name}, and {RENAMES} has no such row")
        if not is_shared and (old_name, new_name) not in self.module_pairs:
            self._fail(
                f"the local {old_name} became {new_name}, and {RENAMES} has no row of this module"
            )

    @staticmethod
    def _qualified_name(scope: Scope, name: str, kind: str) -> str:
        if kind == "parameter":
            return f"{scope.qualified_name}({name})"
        return f"{scope.qualified_name}.{name}" if scope.qualified_name else name

    def _nested_name(self, name: str) -> str:
        """Return the qualified name of a definition in the innermost scope."""
        qualified_name = self.scopes[-1].old.qualified_name
        return f"{qualified_name}.{name}" if qualified_name else name

    # imports

    def _compare_imports(self, pair: ScopePair) -> None:
        """Compare the imports of a scope as sets, and note the new names of what they bind."""
        unmatched = set(pair.new.imported_names)
        for old in pair.old.imported_names:
            matches = [
                new for new in pair.new.imported_names if self._is_same_import(pair, old, new)
            ]
            if not matches:
                self.old_line = old.line
                self._fail(f"the import of {_describe_import(old)} is gone, or has another name")
            same_local_names = [new for new in matches if new.local_name == old.local_name]
            local_name = (same_local_names or matches)[0].local_name
            unmatched -= {new for new in matches if new.local_name == local_name}
            known_new_name = pair.new_names.setdefault(old.local_name, local_name)
            if known_new_name != local_name:
                self._fail(f"{old.local_name} is imported as {known_new_name} and as {local_name}")
            pair.old_names.setdefault(local_name, old.local_name)
        if unmatched:
            first_name = min(unmatched, key=lambda name: name.line)
            self.new_line = first_name.line
            self._fail(f"the import of {_describe_import(first_name)} is new, or has another name")

    def _is_same_import(self, pair: ScopePair, old: ImportedName, new: ImportedName) -> bool:
        """Tell whether an import has become the new one. Its alias may stay or go."""
        if old.guards != new.guards or not self.package.is_same(old.dotted_name, new.dotted_name):
            return False
        if old.binds_first_name or new.binds_first_name:
            has_same_local_name = old.local_name == new.local_name
            return has_same_local_name and old.binds_first_name == new.binds_first_name
        if new.local_name == new.dotted_name.rpartition(".")[2]:
            return True
        qualified_name = self._qualified_name(pair.old, old.local_name, "import")
        exact_names = self.tables.new_names.get((self.old_module.path, qualified_name), frozenset())
        keeps_alias = old.has_alias and old.local_name == new.local_name
        return keeps_alias or new.local_name in exact_names

    # definitions behind expressions

    def _dotted_name(self, node: ast.expr, is_old: bool) -> str | None:
        """Return the dotted name of an expression whose first name is imported, or None."""
        if isinstance(node, ast.Attribute):
            owner = self._dotted_name(node.value, is_old)
            return f"{owner}.{node.attr}" if owner is not None else None
        if not isinstance(node, ast.Name):
            return None
        index = self._resolve_old(node.id) if is_old else self._resolve_new(node.id)
        if index is None:
            return None
        scope = self.scopes[index].old if is_old else self.scopes[index].new
        return scope.bound_name(node.id) if scope.kinds.get(node.id) == "import" else None

    def _receiver_class(self, node: ast.expr) -> ScopePair | None:
        """Return the class whose `self` or `cls` an expression of the old module is."""
        if not isinstance(node, ast.Name):
            return None
        index = self._resolve_old(node.id)
        is_receiver = index is not None and self.scopes[index].old.receiver == node.id
        return self.scopes[index - 1] if index is not None and is_receiver else None

    def _definition(self, node: ast.expr) -> Definition | None:
        """Return what an old expression names, or None where that is not known."""
        dotted_name = self._dotted_name(node, is_old=True)
        if dotted_name is not None:
            split = self.package.split(dotted_name)
            if split is None:
                return Definition(None, dotted_name)
            return self.package.find_definition(*split)
        if isinstance(node, ast.Attribute):
            class_pair = self._receiver_class(node.value)
            if class_pair is not None:
                owner = Definition(self.old_module, class_pair.old.qualified_name)
                return owner.member(node.attr)
            definition = self._definition(node.value)
            return definition.member(node.attr) if definition is not None else None
        if not isinstance(node, ast.Name):
            return None
        index = self._resolve_old(node.id)
        if index is None:
            return None
        scope = self.scopes[index].old
        if scope.kinds.get(node.id) != "definition":
            return None
        return Definition(self.old_module, self._qualified_name(scope, node.id, "definition"))

    # nodes

    def _compare(self, old: ast.AST, new: ast.AST) -> None:
        self.old_line = getattr(old, "lineno", self.old_line)
        self.new_line = getattr(new, "lineno", self.new_line)
        is_chain = isinstance(old, ast.Name | ast.Attribute) and isinstance(
            new, ast.Name | ast.Attribute
        )
        if type(old) is not type(new) and not is_chain:
            self._fail(f"{_describe(old)} became {_describe(new)}")
        compare: Callable[[ast.AST, ast.AST], None] | None = getattr(
            self, f"_compare_{type(old).__name__}", None
        )
        if compare is not None:
            compare(old, new)
        else:
            self._compare_fields(old, new)

    def _compare_fields(self, old: ast.AST, new: ast.AST, skipped: Iterable[str] = ()) -> None:
        for field_name in old._fields:
            if field_name not in UNCOMPARED_FIELDS and field_name not in skipped:
                old_value = getattr(old, field_name, None)
                new_value = getattr(new, field_name, None)
                self._compare_values(field_name, old_value, new_value)

    def _compare_values(self, field_name: str, old_value: object, new_value: object) -> None:
        if isinstance(old_value, list) and isinstance(new_value, list):
            if field_name in STATEMENT_LISTS:
                self._compare_statements(old_value, new_value)
            else:
                self._compare_lists(field_name, old_value, new_value)
        elif isinstance(old_value, ast.AST) and isinstance(new_value, ast.AST):
            self._compare(old_value, new_value)
        elif old_value != new_value:
            self._fail(f"{field_name} {_describe(old_value)} became {_describe(new_value)}")

    def _compare_lists(
        self, field_name: str, old_values: Sequence[object], new_values: Sequence[object]
    ) -> None:
        for old_value, new_value in zip(old_values, new_values, strict=False):
            self._compare_values(field_name, old_value, new_value)
        if len(old_values) != len(new_values):
            self._fail(f"{field_name} had {len(old_values)} parts and has {len(new_values)}")

    def _compare_statements(
        self, old_body: Sequence[ast.stmt], new_body: Sequence[ast.stmt]
    ) -> None:
        """Compare statements in their order, without imports: those are compared by scope."""
        imports = (ast.Import, ast.ImportFrom)
        old_statements = [statement for statement in old_body if not isinstance(statement, imports)]
        new_statements = [statement for statement in new_body if not isinstance(statement, imports)]
        for old, new in zip_longest(old_statements, new_statements):
            if old is None:
                self.new_line = new.lineno
                self._fail(f"{_describe(new)} is new")
            if new is None:
                self.old_line = old.lineno
                self._fail(f"{_describe(old)} is gone")
            self._compare(old, new)

    def _compare_FunctionDef(self, old: Function, new: Function) -> None:
        self._compare_lists("decorator_list", old.decorator_list, new.decorator_list)
        self._compare_name(old.name, new.name)
        self._compare_defaults(old.args, new.args)
        self._compare_values("returns", old.returns, new.returns)
        is_method = self.scopes[-1].old.kind == "class"
        qualified_name = self._nested_name(old.name)
        old_scope = read_function_scope(old, qualified_name, self.old_parent, is_method)
        new_scope = read_function_scope(new, qualified_name, self.new_parent, is_method)
        self._enter(old_scope, new_scope)
        self._compare_parameters(old.args, new.args)
        self._compare_statements(old.body, new.body)
        self.scopes.pop()

    _compare_AsyncFunctionDef = _compare_FunctionDef

    def _compare_Lambda(self, old: ast.Lambda, new: ast.Lambda) -> None:
        self._compare_defaults(old.args, new.args)
        qualified_name = self.scopes[-1].old.qualified_name
        old_scope = read_lambda_scope(old, qualified_name, self.old_parent)
        new_scope = read_lambda_scope(new, qualified_name, self.new_parent)
        self._enter(old_scope, new_scope)
        self._compare_parameters(old.args, new.args)
        self._compare(old.body, new.body)
        self.scopes.pop()

    def _compare_defaults(self, old: ast.arguments, new: ast.arguments) -> None:
        """Compare the kinds of parameters, and what the scope around evaluates."""
        for field_name in ("posonlyargs", "args", "kwonlyargs"):
            num_old = len(getattr(old, field_name))
            num_new = len(getattr(new, field_name))
            if num_old != num_new:
                self._fail(f"a function had {num_old} parameters ({field_name}) and has {num_new}")
        for field_name in ("vararg", "kwarg"):
            if (getattr(old, field_name) is None) != (getattr(new, field_name) is None):
                self._fail(f"a function has {field_name} on one side only")
        for old_parameter, new_parameter in zip(
            parameters_of(old), parameters_of(new), strict=True
        ):
            self._compare_values("annotation", old_parameter.annotation, new_parameter.annotation)
        self._compare_lists("defaults", old.defaults, new.defaults)
        self._compare_lists("defaults", old.kw_defaults, new.kw_defaults)

    def _compare_parameters(self, old: ast.arguments, new: ast.arguments) -> None:
        for old_parameter, new_parameter in zip(
            parameters_of(old), parameters_of(new), strict=True
        ):
            self.old_line = old_parameter.lineno
            self.new_line = new_parameter.lineno
            self._compare_name(old_parameter.arg, new_parameter.arg)

    def _compare_ClassDef(self, old: ast.ClassDef, new: ast.ClassDef) -> None:
        self._compare_fields(old, new, skipped=("name", "body"))
        self._compare_name(old.name, new.name)
        qualified_name = self._nested_name(old.name)
        old_scope = read_class_scope(old, qualified_name, self.old_parent)
        new_scope = read_class_scope(new, qualified_name, self.new_parent)
        self._enter(old_scope, new_scope)
        self._compare_statements(old.body, new.body)
        self.scopes.pop()

    def _compare_comprehension_scope(self, old: Comprehension, new: Comprehension) -> None:
        """Compare a comprehension. Its first iterable is evaluated in the scope around it."""
        self._compare(old.generators[0].iter, new.generators[0].iter)
        qualified_name = self.scopes[-1].old.qualified_name
        old_scope = read_comprehension_scope(old, qualified_name, self.old_parent)
        new_scope = read_comprehension_scope(new, qualified_name, self.new_parent)
        self._enter(old_scope, new_scope)
        self._compare_fields(old.generators[0], new.generators[0], skipped=("iter",))
        self._compare_lists("generators", old.generators[1:], new.generators[1:])
        self._compare_fields(old, new, skipped=("generators",))
        self.scopes.pop()

    _compare_ListComp = _compare_comprehension_scope
    _compare_SetComp = _compare_comprehension_scope
    _compare_DictComp = _compare_comprehension_scope
    _compare_GeneratorExp = _compare_comprehension_scope

    def _compare_Name(self, old: ast.Name | ast.Attribute, new: ast.Name | ast.Attribute) -> None:
        """Compare a variable, or an attribute such as `module.name`."""
        if isinstance(old, ast.Name) and isinstance(new, ast.Name):
            self._compare_name(old.id, new.id)
            return
        old_dotted_name = self._dotted_name(old, is_old=True)
        new_dotted_name = self._dotted_name(new, is_old=False)
        if old_dotted_name is not None and new_dotted_name is not None:
            self._compare(_first_name(old), _first_name(new))
            if not self.package.is_same(old_dotted_name, new_dotted_name):
                self._fail(f"{old_dotted_name} became {new_dotted_name}")
            return
        if not isinstance(old, ast.Attribute) or not isinstance(new, ast.Attribute):
            self._fail(f"{_describe(old)} became {_describe(new)}")
        self._compare(old.value, new.value)
        self.old_line = old.end_lineno or old.lineno
        self.new_line = new.end_lineno or new.lineno
        class_pair = self._receiver_class(old.value)
        if class_pair is not None:
            self._bind(class_pair, old.attr, new.attr)
        elif not self.package.allows_member(self._definition(old.value), old.attr, new.attr):
            self._fail(f"the attribute {old.attr} became {new.attr}, which {RENAMES} does not say")

    _compare_Attribute = _compare_Name

    def _compare_Call(self, old: ast.Call, new: ast.Call) -> None:
        self._compare(old.func, new.func)
        self._compare_lists("args", old.args, new.args)
        owner = self._definition(old.func)
        for old_keyword, new_keyword in zip(old.keywords, new.keywords, strict=False):
            self._compare_keyword(old_keyword, new_keyword, owner)
        if len(old.keywords) != len(new.keywords):
            self._fail(f"a call had {len(old.keywords)} keywords and has {len(new.keywords)}")

    def _compare_keyword(
        self, old: ast.keyword, new: ast.keyword, owner: Definition | None = None
    ) -> None:
        """Compare a keyword; `owner` is what is called, None if that is not known."""
        self.old_line = old.lineno
        self.new_line = new.lineno
        if (old.arg is None) != (new.arg is None):
            self._fail(f"{_describe(old)} became {_describe(new)}")
        if old.arg is not None and new.arg is not None:
            expected_names = self.package.expected_keywords(owner, old.arg)
            if expected_names is None:
                is_allowed = self.tables.allows_pair(old.arg, new.arg)
            else:
                is_allowed = new.arg in expected_names
            if not is_allowed:
                expected = (
                    f"; {' or '.join(sorted(expected_names))} is expected" if expected_names else ""
                )
                self._fail(
                    f"the keyword {old.arg} became {new.arg}; {RENAMES} does not say so{expected}"
                )
        self._compare(old.value, new.value)

    def _compare_Assign(self, old: ast.Assign, new: ast.Assign) -> None:
        is_module_level = len(self.scopes) == 1
        old_exports = _exported_names(old) if is_module_level else None
        new_exports = _exported_names(new) if is_module_level else None
        if old_exports is None or new_exports is None:
            self._compare_fields(old, new)
            return
        prefix = self.old_module.dotted_name
        new_prefix = self.old_module.new_dotted_name
        missing_exports = set(new_exports)
        for name in old_exports:
            matches = {
                new
                for new in missing_exports
                if self.package.is_same(f"{prefix}.{name}", f"{new_prefix}.{new}")
            }
            if not matches:
                self._fail(f"__all__ has no {name}, nor its new name")
            missing_exports -= matches
        if missing_exports:
            self._fail(f"__all__ has new names: {', '.join(sorted(missing_exports))}")

    def _compare_Global(self, old: ast.Global, new: ast.Global) -> None:
        if len(old.names) != len(new.names):
            self._fail(f"{_describe(old)} became {_describe(new)}")
        for old_name, new_name in zip(old.names, new.names, strict=True):
            self._compare_name(old_name, new_name)

    _compare_Nonlocal = _compare_Global

    def _compare_optional_name(self, old_name: str | None, new_name: str | None) -> None:
        if old_name is not None and new_name is not None:
            self._compare_name(old_name, new_name)
        elif old_name != new_name:
            self._fail(f"{old_name or 'no name'} became {new_name or 'no name'}")

    def _compare_ExceptHandler(self, old: ast.ExceptHandler, new: ast.ExceptHandler) -> None:
        self._compare_optional_name(old.name, new.name)
        self._compare_fields(old, new, skipped=("name",))

    def _compare_MatchAs(
        self, old: ast.MatchAs | ast.MatchStar, new: ast.MatchAs | ast.MatchStar
    ) -> None:
        self._compare_optional_name(old.name, new.name)
        self._compare_fields(old, new, skipped=("name",))

    _compare_MatchStar = _compare_MatchAs

    def _compare_MatchMapping(self, old: ast.MatchMapping, new: ast.MatchMapping) -> None:
        self._compare_optional_name(old.rest, new.rest)
        self._compare_fields(old, new, skipped=("rest",))

    def _compare_MatchClass(self, old: ast.MatchClass, new: ast.MatchClass) -> None:
        self._compare_fields(old, new, skipped=("kwd_attrs",))
        owner = self._definition(old.cls)
        for old_name, new_name in zip(old.kwd_attrs, new.kwd_attrs, strict=True):
            if not self.package.allows_member(owner, old_name, new_name):
                self._fail(
                    f"the attribute {old_name} became {new_name}, which {RENAMES} does not say"
                )

    # constants

    def _compare_Constant(self, old: ast.Constant, new: ast.Constant) -> None:
        if isinstance(old.value, str) and isinstance(new.value, str):
            self._compare_texts(old.value, new.value)
        elif type(old.value) is not type(new.value) or repr(old.value) != repr(new.value):
            self._fail(f"{_describe(old)} became {_describe(new)}")

    def _compare_JoinedStr(self, old: ast.JoinedStr, new: ast.JoinedStr) -> None:
        for index, (old_part, new_part) in enumerate(zip(old.values, new.values, strict=False)):
            old_text = _text_of(old_part)
            new_text = _text_of(new_part)
            if old_text is None or new_text is None:
                self._compare(old_part, new_part)
                continue
            old_rest = _without_expression(old_text, old.values[index + 1 : index + 2])
            new_rest = _without_expression(new_text, new.values[index + 1 : index + 2])
            if old_rest is not None and new_rest is not None:
                self._compare_texts(old_rest, new_rest)
            else:
                self._compare_texts(old_text, new_text)
        if len(old.values) != len(new.values):
            self._fail(f"{_describe(old)} became {_describe(new)}")

    def _compare_texts(self, old_text: str, new_text: str) -> None:
        """Compare two strings. Dotted names, paths and identifiers may follow the tables."""
        if old_text == new_text:
            return
        is_list = all(LIST_OF_IDENTIFIERS.fullmatch(text) for text in (old_text, new_text))
        old_tokens = STRING_TOKEN.findall(old_text)
        new_tokens = STRING_TOKEN.findall(new_text)
        is_allowed = STRING_TOKEN.split(old_text) == STRING_TOKEN.split(new_text) and all(
            self._allows_token(old_token, new_token, is_list)
            for old_token, new_token in zip(old_tokens, new_tokens, strict=True)
        )
        if not is_allowed:
            self._fail(f"the string {_shorten(repr(old_text))} became {_shorten(repr(new_text))}")

    def _allows_token(self, old_token: str, new_token: str, is_list: bool) -> bool:
        """Tell whether a part of a string may become another one.

        In a string that holds nothing but identifiers, `is_list`, any row of the table allows it.
        """
        if old_token == new_token or self._is_same_place(old_token, new_token):
            return True
        if not is_list or IDENTIFIER.split(old_token) != IDENTIFIER.split(new_token):
            return False
        pairs = zip(IDENTIFIER.findall(old_token), IDENTIFIER.findall(new_token), strict=True)
        return all(
            self.tables.allows_pair(*pair) or pair in self.tables.module_name_pairs
            for pair in pairs
        )

    def _is_same_place(self, old_token: str, new_token: str) -> bool:
        """Tell whether two dotted names or paths, with or without `:function`, mean the same."""
        old_place, _, old_function = old_token.partition(":")
        new_place, _, new_function = new_token.partition(":")
        if "/" in old_place or old_place.endswith(".py"):
            is_same = self._is_same_path(old_place, new_place)
            old_dotted_name = self._dotted_path(old_place)
            new_dotted_name = self._dotted_path(new_place)
        else:
            old_dotted_name = self._absolute_name(old_place, self.old_parent)
            new_dotted_name = self._absolute_name(new_place, self.new_parent)
            is_same = self._is_same_dotted_name(old_place, old_dotted_name, new_dotted_name)
        if not old_function:
            return is_same and not new_function
        is_same_function = self.package.is_same(
            f"{old_dotted_name}.{old_function}", f"{new_dotted_name}.{new_function}"
        )
        return is_same and is_same_function

    def _is_same_dotted_name(
        self, old_text: str, old_dotted_name: str, new_dotted_name: str
    ) -> bool:
        split = self.package.split(old_dotted_name)
        if split is None or not self.package.is_same(old_dotted_name, new_dotted_name):
            return False
        num_module_parts = split[0].dotted_name.count(".")  # behind the name of the package
        is_written_out = old_text.startswith((".", f"{PACKAGE}."))
        return num_module_parts >= 1 if is_written_out else num_module_parts >= 2

    @staticmethod
    def _absolute_name(text: str, parent: str) -> str:
        if text.startswith("."):
            return parent + text
        return text if text.startswith(f"{PACKAGE}.") else f"{PACKAGE}.{text}"

    @staticmethod
    def _dotted_path(path: str) -> str:
        return dotted_module(path if path.startswith(f"{PACKAGE}/") else f"{PACKAGE}/{path}")

    def _is_same_path(self, old_path: str, new_path: str) -> bool:
        """Tell whether two paths of files or folders of the package mean the same."""
        prefix = "" if old_path.startswith(f"{PACKAGE}/") else f"{PACKAGE}/"
        old_full_path = prefix + old_path
        new_full_path = prefix + new_path
        if old_full_path in self.package.folders:
            return (
                self.tables.new_path(f"{old_full_path}/__init__.py")
                == f"{new_full_path}/__init__.py"
            )
        if old_full_path in self.tables.new_paths:
            return self.tables.new_path(old_full_path) == new_full_path
        is_base_name = "/" not in old_path and old_path.endswith(".py") and new_path.endswith(".py")
        names = (old_path.removesuffix(".py"), new_path.removesuffix(".py"))
        return is_base_name and names in self.tables.module_name_pairs


def _package_name(path: str) -> str:
    """Return the dotted name of the package that a module belongs to; of a package, its own."""
    return path.rpartition("/")[0].replace("/", ".")


def _first_name(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _exported_names(statement: ast.Assign) -> list[str] | None:
    """Return the names of `__all__ = [...]`; None of any other assignment."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id="__all__")], value=ast.List(elts=names) | ast.Tuple(elts=names)
        ):
            texts = [_text_of(name) for name in names]
            return [text for text in texts if text is not None] if None not in texts else None
    return None


def _text_of(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _without_expression(text: str, following: Sequence[ast.expr]) -> str | None:
    """Return a text without the `expression=` that `{expression=}` put at its end, or None."""
    if not following or not isinstance(following[0], ast.FormattedValue):
        return None
    before_sign, sign, _ = text.rstrip().rpartition("=")
    expression = ast.unparse(following[0].value)
    if not sign or not before_sign.rstrip().endswith(expression):
        return None
    return before_sign.rstrip().removesuffix(expression)


def _describe_import(name: ImportedName) -> str:
    return f"{name.dotted_name} as {name.local_name}" if name.has_alias else name.dotted_name


def _describe(value: object) -> str:
    """Return code or a value as it stands in a message."""
    if isinstance(value, ast.expr | ast.stmt | ast.keyword):
        return f"`{_shorten(ast.unparse(value).strip().partition(chr(10))[0])}`"
    return type(value).__name__ if isinstance(value, ast.AST) else repr(value)


def _shorten(text: str) -> str:
    return text if len(text) <= TEXT_WIDTH else f"{text[: TEXT_WIDTH - 3]}..."


# ---------------------------------------------------------------------- report


@dataclass
class Report:
    """What the comparison of the package found."""

    problems: list[str] = field(default_factory=list)  # a line each
    listed_modules: list[ChangedModule] = field(default_factory=list)
    num_equal: int = 0
    num_different: int = 0
    num_missing: int = 0

    def summary(self) -> str:
        """Return the closing line."""
        counts = Counter(point for module in self.listed_modules for point in module.points)
        points = ", ".join(
            f"{point}: {counts[point]}"
            for point in sorted(counts, key=lambda text: (len(text), text))
        )
        num_listed = len(self.listed_modules)
        num_modules = self.num_equal + num_listed + self.num_different + self.num_missing
        listed = f"{num_listed} listed as changed" + (f" (points {points})" if points else "")
        return (
            f"{num_modules} modules: {self.num_equal} equal, {listed}, "
            f"{self.num_different} different, {self.num_missing} missing"
        )


def read_base_sources(root: Path, base: str) -> dict[str, bytes]:
    """Return the modules of the package at a commit, by path."""
    command = ["git", "archive", "--format=tar", base, PACKAGE]
    archive = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout
    sources: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            content = files.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                sources[member.name] = content.read()
    return sources


def compare_repository(root: Path, base: str) -> Report:
    """Compare every module of the package in the working tree with the one of the base commit."""
    tables = read_tables(root)
    sources = read_base_sources(root, base)
    package = OldPackage(sources, tables)
    report = Report(_find_stale_rows(tables, sources))
    known_paths: set[str] = set()
    for old_module in sorted(package.modules.values(), key=lambda module: module.path):
        new_path = tables.new_path(old_module.path)
        known_paths.add(new_path)
        _compare_file(report, package, old_module, root, new_path)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        new_path = path.relative_to(root).as_posix()
        if new_path in known_paths or not _has_code(path):
            continue
        known_paths.add(new_path)
        if new_path in tables.changed_modules:
            report.listed_modules.append(tables.changed_modules[new_path])
        else:
            report.num_different += 1
            report.problems.append(f"{new_path}: the module is new, and {MOVES} has no row for it")
    for new_path in sorted(tables.changed_modules.keys() - known_paths):
        report.problems.append(
            f"{new_path}: listed in {CHANGED_MODULES}, but no such module is there"
        )
    return report


def _find_stale_rows(tables: RenameTables, sources: Mapping[str, bytes]) -> list[str]:
    """Return a line for each old path of the tables that the base commit does not have."""
    moved = [path for path in tables.new_paths if path.endswith(".py") and path not in sources]
    renamed = {
        path
        for path, _ in tables.new_names
        if path.startswith(f"{PACKAGE}/") and path not in sources
    }
    lines = [f"{path}: in {MOVES}, but the base commit has no such module" for path in moved]
    lines += [
        f"{path}: in {RENAMES}, but the base commit has no such module" for path in sorted(renamed)
    ]
    return lines


def _compare_file(
    report: Report, package: OldPackage, old_module: OldModule, root: Path, new_path: str
) -> None:
    """Compare one module and note the outcome in the report."""
    listed_module = package.tables.changed_modules.get(new_path)
    path = root / new_path
    if not path.is_file():
        if listed_module is not None:
            report.listed_modules.append(listed_module)
            return
        report.num_missing += 1
        report.problems.append(f"{new_path}: missing; it was {old_module.path}")
        return
    difference: str | None = None
    try:
        ModuleComparison(package, old_module, new_path).compare_module(
            parse_normalised(path.read_bytes())
        )
    except DifferenceFound as found:
        difference = str(found)
    except SyntaxError as error:
        difference = f"new line {error.lineno}: no Python: {error.msg}"
    if listed_module is not None:
        report.listed_modules.append(listed_module)
        if difference is None:
            points = ", ".join(listed_module.points)
            report.problems.append(
                f"{new_path}: listed as changed (point {points}), but equal; remove its row"
            )
    elif difference is None:
        report.num_equal += 1
    else:
        report.num_different += 1
        report.problems.append(f"{new_path}: {difference}")


def _has_code(path: Path) -> bool:
    """Tell whether a module holds more than a docstring and imports from `__future__`."""
    try:
        statements = parse_normalised(path.read_bytes()).body
    except SyntaxError:
        return True
    return not all(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in statements
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Return 1 if a module differs or is missing, or if a row is stale."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_asts", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--base", required=True, help="commit before the rename")
    parser.add_argument(
        "--list", action="store_true", help="print the modules that are listed as changed, too"
    )
    options = parser.parse_args(arguments)
    try:
        report = compare_repository(Path.cwd(), options.base)
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(
            f"git failed with exit code {error.returncode}: {' '.join(error.cmd)}", file=sys.stderr
        )
        return 2
    if options.list:
        for module in sorted(report.listed_modules, key=lambda module: module.path):
            points = ", ".join(module.points)
            print(f"{module.path}: listed as changed (point {points}): {module.reason}")
    for problem in report.problems:
        print(problem)
    print(report.summary())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
