"""Reads the arguments of a command in a shell script and fills in its variables. Nothing is run.

bashlex refuses 36 of 160 scripts of verl: it knows neither arrays nor `$((...))`.

What is understood: comments, continued lines, quotes, assignments (also of arrays), $name, ${name},
${name:-default}, "${name[@]}", $((sums of whole numbers)), $(pwd) and `if` with a comparison of
what is known. What depends on any other command or branch, or on an argument of the script, is
marked with UNKNOWN.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

UNKNOWN = "\x00"  # stands in a word for what only a shell could tell; no script may hold it
MAX_WORD = 100_000  # characters after variables are filled in: they may double each other
MAX_WORDS = 20_000
_ASSIGNMENT = re.compile(
    r"(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=", re.DOTALL
)
_OPENERS = ("for", "while", "until", "case", "{")
_CLOSERS = ("fi", "done", "esac", "}")
_INNER = ("then", "else", "do", "{", "}", "!", "time", "nohup", "exec")  # a command may follow
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_WITH_DEFAULT = re.compile(r"([A-Za-z_]\w*|\d)(:?[-=])(.*)\Z", re.DOTALL)


@dataclass(frozen=True)
class ShellWord:
    text: str
    line: int  # counted from 1


@dataclass
class ShellScript:
    """The commands of a script in order, and the variables as they stand at its end."""

    environment: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[ShellWord]] = field(default_factory=list)
    # variables that the script took from there
    used_environment: dict[str, str] = field(default_factory=dict)
    # those that it would take, and the defaults used instead
    defaulted_variables: dict[str, str] = field(default_factory=dict)
    # Of each open block: whether the part at hand is run, and whether that or a part before was.
    # None: perhaps.
    _blocks: list[tuple[bool | None, bool | None]] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Read the text of a script, and fill `commands` and the variables. Raise ValueError for a
        quote that does not end, and for words that grow beyond all measure.
        """
        commands = split_commands(text)
        for words, following in zip(commands, [*commands[1:], []], strict=True):
            # no && or || behind a condition
            is_alone = bool(following) and following[0].text == "then"
            while words and words[0].text in _INNER:
                self._track_block(words, is_alone)
                words = words[1:]
            if not words:
                continue
            self._track_block(words, is_alone)
            if words[0].text in ("if", "elif", *_OPENERS, *_CLOSERS) or words[0].text.endswith(
                "()"
            ):
                continue
            if all(taken is not False for taken, _ in self._blocks) and (
                words := self._record_assignments(words)
            ):
                self.commands.append(self._expand_words(words))

    def _track_block(self, words: list[ShellWord], is_single_condition: bool) -> None:
        """Update the stack of open blocks for a word that begins, continues or ends one.
        `is_single_condition` says that the condition is the only command before `then`, so that it
        can be evaluated.
        """
        word = words[0].text
        blocks = self._blocks
        if word in _OPENERS or (word.endswith("()") and words[-1].text == "{"):
            blocks.append((None, None))
        elif word in _CLOSERS and blocks:
            blocks.pop()
        elif word == "if" or (word in ("elif", "else") and blocks):
            before = blocks.pop()[1] if word != "if" else False
            holds = word == "else" or (
                self._evaluate_condition(words[1:]) if is_single_condition else None
            )
            is_run: bool | None
            if before or holds is False:
                is_run = False
            elif before is None:
                is_run = None
            else:
                is_run = holds
            has_run: bool | None
            if before or is_run:
                has_run = True
            elif before is None or is_run is None:
                has_run = None
            else:
                has_run = False
            blocks.append((is_run, has_run))

    def _evaluate_condition(self, words: list[ShellWord]) -> bool | None:
        """Return whether a condition in brackets holds; None where only a shell could tell."""
        texts = [text for word in words for text in self.expand_word(word.text)]
        if (
            any(UNKNOWN in text for text in texts)
            or [text.strip("[]") for text in (*texts[:1], *texts[-1:])] != [""] * 2
        ):
            return None
        match texts[1:-1]:
            case [left, "=" | "==" | "-eq", right] if "*" not in right:
                return left == right
            case [left, "!=" | "-ne", right] if "*" not in right:
                return left != right
            case ["-z" | "-n" as kind, text]:
                return bool(text) == (kind == "-n")
        return None

    def _record_assignments(self, words: list[ShellWord]) -> list[ShellWord]:
        """Record the assignments in front of a command, and return the remaining words. Values set
        in a branch or loop that may not run are UNKNOWN.
        """
        if words[0].text in ("export", "local", "readonly", "declare"):
            words = words[1:]
        while words and (match := _ASSIGNMENT.match(words[0].text)):
            name = match[1]
            plus = match[2]
            value = words[0].text[match.end() :]
            if value.startswith("(") and value.endswith(")"):
                items = [
                    word.text
                    for part in split_commands(value[1:-1])
                    for word in self._expand_words(part)
                ]
                known = items if self._is_certain_to_run else [UNKNOWN]
                self.arrays[name] = [*self.arrays.get(name, []), *known] if plus else known
            else:
                value = " ".join(self.expand_word(value)) if self._is_certain_to_run else UNKNOWN
                self.variables[name] = self.variables.get(name, "") + value if plus else value
            words = words[1:]
        return words

    @property
    def _is_certain_to_run(self) -> bool:
        """Return whether the present line is run for certain: no open block that may be skipped is
        around it.
        """
        return all(taken for taken, _ in self._blocks)

    def _expand_words(self, words: list[ShellWord]) -> list[ShellWord]:
        """Return the words with variables and quotes resolved; an array becomes several words.
        Raise ValueError for more than MAX_WORDS.
        """
        found = [
            ShellWord(text, word.line) for word in words for text in self.expand_word(word.text)
        ]
        if len(found) > MAX_WORDS:
            raise ValueError(f"a command has more than {MAX_WORDS} words.")
        return found

    def expand_word(self, raw_word: str) -> list[str]:
        """Return a raw word without its quotes and with its variables filled in: several words for
        an array or for a bare variable with spaces, none for "$@". Raise ValueError for a word that
        grows too long.
        """
        if match := re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', raw_word):
            return self.arrays.get(match[1], [])
        if raw_word.strip('"') in ("$@", "${@}", "$*", "${@:1}"):
            return []
        if match := re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", raw_word):
            return self.look_up_variable(match[1]).split()
        text = ""
        i = 0
        quote = ""
        while i < len(raw_word):
            char = raw_word[i]
            if char == "\\" and quote != "'" and i + 1 < len(raw_word):
                keeps = quote == '"' and raw_word[i + 1] not in '"\\$`'
                text += raw_word[i : i + 2] if keeps else raw_word[i + 1]
                i += 2
            elif char in "'\"" and quote in ("", char):
                quote = "" if quote else char
                i += 1
            elif char in "$`" and quote != "'":
                value, i = self._substitute_at(raw_word, i)
                text += value
            else:
                text += char
                i += 1
            if len(text) > MAX_WORD:
                raise ValueError(
                    f"a word grows beyond {MAX_WORD} characters when its variables are filled in."
                )
        return [text]

    def _substitute_at(self, raw: str, position: int) -> tuple[str, int]:
        """Return (the text for the expression that begins with $ or ` at `position` of the raw
        word, the position behind the expression). The text is UNKNOWN where only a shell could
        tell.
        """
        if raw[position] == "`":
            end = raw.find("`", position + 1)
            return UNKNOWN, len(raw) if end < 0 else end + 1
        if raw.startswith("$((", position):
            end = find_closing_bracket(raw, position + 1)
            return self._evaluate_sum(raw[position + 3 : end - 2]), end
        if raw.startswith("$(", position):
            end = find_closing_bracket(raw, position + 1)
            return self.environment.get("PWD", ".") if raw[
                position + 2 : end - 1
            ].strip() == "pwd" else UNKNOWN, end
        if raw.startswith("${", position):
            end = find_closing_bracket(raw, position + 1)
            return self._expand_parameter(raw[position + 2 : end - 1]), end
        match = _VARIABLE.match(raw, position + 1)
        if match:
            return self.look_up_variable(match[0]), match.end()
        return (
            (UNKNOWN, position + 2)
            if position + 1 < len(raw) and raw[position + 1] in "0123456789#?!@*"
            else ("$", position + 1)
        )

    def _expand_parameter(self, expression: str) -> str:
        """Return the text for `${expression}`: a variable, or its default if it is empty or not
        set, which is recorded. Return references of the configuration, such as ${oc.env:X},
        unchanged, and UNKNOWN for all else.
        """
        if _VARIABLE.fullmatch(expression):
            return self.look_up_variable(expression)
        if match := _WITH_DEFAULT.match(expression):
            name = match[1]
            default = match[3]
            known = self.variables.get(name, self.environment.get(name, ""))
            if known:
                return self.look_up_variable(name)
            self.defaulted_variables[name] = value = "".join(self.expand_word(default))
            return value
        # of the configuration, not of the shell
        if re.match(r"(oc\.\w+:|\.|[A-Za-z_]\w*\.)", expression):
            return "${" + expression + "}"
        return UNKNOWN

    def look_up_variable(self, name: str) -> str:
        """Return the value of a variable of the script or of the environment, whose use is
        recorded; the first item of an array; UNKNOWN for a variable that is not set.
        """
        if name in self.variables:
            return self.variables[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else ""
        if name in self.environment:
            self.used_environment[name] = self.environment[name]
            return self.environment[name]
        return UNKNOWN

    def _evaluate_sum(self, text: str) -> str:
        """Return the value of `$((...))` for whole numbers and variables as text; UNKNOWN for
        anything more.
        """
        words = "".join(self.expand_word(text))
        plain = re.sub(r"[A-Za-z_]\w*", lambda match: self.look_up_variable(match[0]), words)
        try:
            return str(_evaluate_arithmetic(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return UNKNOWN


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: a - b * int(a / b),
}


def _evaluate_arithmetic(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers, with a shell's division and remainder.
    Raise ValueError for other expressions and for numbers beyond 63 bits.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1 << 63:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](
            _evaluate_arithmetic(node.left), _evaluate_arithmetic(node.right)
        )
        if abs(value) < 1 << 63:
            return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_arithmetic(node.operand)
    raise ValueError("not a sum of whole numbers")


def find_closing_bracket(raw: str, position: int) -> int:
    """Return the position after the bracket that closes the one at `position`, or the end of the
    text.
    """
    pairs = {"(": ")", "{": "}"}
    opener = raw[position]
    closer = pairs[raw[position]]
    depth = 0
    while position < len(raw):
        if raw[position] == "\\":
            position += 1
        elif raw[position] == opener:
            depth += 1
        elif raw[position] == closer:
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return len(raw)


def split_commands(text: str) -> list[list[ShellWord]]:
    """Return the commands of a script as lists of raw words, with quotes and variables still in
    them. Raise ValueError for a quote that does not end.
    """
    return _CommandSplitter(text).split()


class _CommandSplitter:
    def __init__(self, text: str) -> None:
        """Begin at the first character of the text."""
        self._text = text
        self._position = 0
        self._line = 1
        self._word: str | None = None
        self._word_line = 1
        self._words: list[ShellWord] = []
        self._commands: list[list[ShellWord]] = []

    def split(self) -> list[list[ShellWord]]:
        """Return the commands of the text as lists of raw words. Raise ValueError for a quote that
        does not end.
        """
        text = self._text
        while self._position < len(text):
            char = text[self._position]
            if char == "\\" and text.startswith(("\n", "\r\n"), self._position + 1):
                self._advance_to(text.index("\n", self._position) + 1)
            elif char == "\\":
                self._append_to_word(self._position + 2)
            elif char in "'\"":
                self._append_to_word(self._find_quote_end(char))
            elif text.startswith(("$(", "${"), self._position):
                self._append_to_word(find_closing_bracket(text, self._position + 1))
            elif char == "(" and self._word is not None and self._word.endswith("="):
                self._append_to_word(self._find_array_end())
            elif char == "#" and self._word is None:
                end = text.find("\n", self._position)
                self._advance_to(len(text) if end < 0 else end)
            elif char in "\n;|&" or (char in "<>" and self._word is None):
                self._end_command()
                self._advance_to(self._position + 1)
            elif char.isspace():
                self._end_word()
                self._advance_to(self._position + 1)
            else:
                self._append_to_word(self._position + 1)
        self._end_command()
        return self._commands

    def _find_quote_end(self, quote: str) -> int:
        """Return the position after the quote that closes the one at the present position. Raise
        ValueError if there is none.
        """
        i = self._position + 1
        while i < len(self._text) and self._text[i] != quote:
            i += 2 if self._text[i] == "\\" and quote == '"' else 1
        if i >= len(self._text):
            raise ValueError(f"line {self._line}: the quote {quote} does not end; close it.")
        return i + 1

    def _find_array_end(self) -> int:
        """Return the position after the bracket that ends `name=( ... )`, whose comments and quotes
        may hold brackets.
        """
        i = self._position + 1
        while i < len(self._text) and self._text[i] != ")":
            if self._text[i] == "#" and self._text[i - 1].isspace():
                end = self._text.find("\n", i)
                i = len(self._text) if end < 0 else end
            elif self._text[i] in "'\"":
                here = self._position
                self._position = i
                i = self._find_quote_end(self._text[i])
                self._position = here
            elif self._text.startswith(("$(", "${"), i):
                i = find_closing_bracket(self._text, i + 1)
            else:
                i += 1
        return min(i + 1, len(self._text))

    def _append_to_word(self, end: int) -> None:
        """Append the text up to `end` to the present word, begin a word if there is none, and
        advance to `end`.
        """
        if self._word is None:
            self._word = ""
            self._word_line = self._line
        self._word += self._text[self._position : end]
        self._advance_to(end)

    def _advance_to(self, end: int) -> None:
        """Set the present position to `end`, and count the lines between."""
        self._line += self._text.count("\n", self._position, end)
        self._position = end

    def _end_word(self) -> None:
        """Add the present word, if there is one, to the present command."""
        if self._word is not None:
            self._words.append(ShellWord(self._word, self._word_line))
            self._word = None

    def _end_command(self) -> None:
        """End the present word, and add the present command, if it has words, to the commands."""
        self._end_word()
        if self._words:
            self._commands.append(self._words)
            self._words = []
