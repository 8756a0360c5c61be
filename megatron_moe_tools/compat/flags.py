"""The command line of `megatron-moe flags`: what a Megatron-LM flag, list of flags or script is here."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter

import yaml

from megatron_moe.config.command_line import groups, is_flag, parts
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.paths import read_settings
from megatron_moe.io.program import DONE, FAILED, note, run_program, say
from megatron_moe_tools import compat
from megatron_moe_tools.compat import megatron_flags
from megatron_moe_tools.compat.megatron_flags import ANSWERS, Answer

NAME = "megatron-moe flags"
BY_VALUE = "by value"
"""The answer for a flag without the value that decides."""

USAGE = """[--json | --rewrite] FLAG [VALUE ...] ... | --script FILE ...

What a flag of Megatron-LM is here: taken, an alias of another flag, always so, ignored, refused, or unknown; of a flag
whose value decides, and is not given, the answer for each value.

--json          print an object, flag -> {"answer": ..., "reason": ...}
--rewrite       print a script that trains the same model here, with the exports and $VARIABLES that the command needs
--script FILE   take the flags from a shell script, which is read and not run, or from a test case of Megatron-LM's
                (.yaml); may be given several times

The exit status of --rewrite and --script is 1 where a flag is refused or unknown: without it another model trains.
"""


@dataclass(frozen=True)
class Asked:
    """A flag with its values, as typed, and its answer; `row` is the table's, where it has one."""

    flag: str
    values: tuple[str, ...]
    answer: str
    reason: str
    row: Answer | None


def main(argv: list[str]) -> int:
    """Answer as the command line asks, and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    files, words, switches = _split(argv)
    if {"--json", "--rewrite"} <= switches:
        raise ConfigError("--json, --rewrite: print different things; keep one")
    if "--help" in switches or not (files or words):
        say(f"usage: {NAME} {USAGE}")
        return DONE
    read = Script(flags=list(map(parts, groups(words))))
    for file in files:
        text = read_settings("--script", file, "shell script")
        found = read_test_case(text, file) if file.endswith((".yaml", ".yml")) else read_script(text)
        if not found.flags:
            raise ConfigError(
                f"--script {file}: has no command of a .py program with flags; give a shell script, or a test case of "
                "Megatron-LM's with MODEL_ARGS"
            )
        read.flags += found.flags
        read.variables.update(found.variables)
        read.conditions.update(found.conditions)
        read.launcher = found.launcher or read.launcher
        read.settings += found.settings
        read.sourced += found.sourced
        read.others += found.others
    asked, lost = [], []
    for flag, values in read.flags:
        asked.append(ask(flag, values, list(map(read.resolved, values))))
        if asked[-1].answer in ("refused", "unknown"):
            lost.append(flag)
    if "--json" in switches:
        say(json.dumps({one.flag: {"answer": one.answer, "reason": one.reason} for one in asked}, indent=2))
    elif "--rewrite" in switches:
        say(rewritten(asked, read))
    else:
        say(listed(asked, read))
    if lost and (files or "--rewrite" in switches):
        note(f"{NAME}: another model trains without what is refused or unknown: {', '.join(dict.fromkeys(lost))}")
        return FAILED
    if read.others:
        note(f"{NAME}: {_LEFT_OUT.format(read.others)}")
        return FAILED
    return DONE


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], set[str]]:
    """Return the scripts, the flags that are asked about, and this program's own switches."""
    files, words, switches = [], [], set()
    rest = iter(argv)
    for word in rest:
        if word == "--script":
            file = next(rest, None)
            if file is None:
                raise ConfigError("--script: names no file; use --script FILE")
            files.append(file)
        elif word in ("--json", "--rewrite", "--help", "-h"):
            switches.add("--help" if word == "-h" else word)
        else:
            words.append(word)
    if words and not is_flag(words[0]):
        raise ConfigError(f"{words[0]}: is no flag; write e.g. --moe-grouped-gemm, or --script FILE")
    return files, words, switches


def ask(flag: str, values: Sequence[str], resolved: Sequence[str]) -> Asked:
    """Return the answer for a flag.

    Args:
        values: as typed. resolved: the same without quotes, with what is known of the variables put in.
    """
    rows = megatron_flags.table().get(flag, ())
    if not values and rows and rows[0].values:
        said = []
        for one in rows:
            answer = f"{', '.join(one.values) or 'any other'}: {one.answer} {one.target}".strip()
            said.append(f"{answer} ({one.reason})")
        if flag in _own():
            said.append("any other: taken")
        return Asked(flag, (), BY_VALUE, "; ".join(said), None)
    row = megatron_flags.row_for(flag, resolved)
    if row is None and flag in _own():
        return Asked(flag, tuple(values), "taken", _own()[flag], None)
    if row is None or row.answer == "unknown":
        return Asked(flag, tuple(values), "unknown", megatron_flags.unknown(flag, _own()), None)
    return Asked(flag, tuple(values), row.answer, row.says, row)


@lru_cache(maxsize=1)
def _own() -> dict[str, str]:
    """Return this project's flags, each with the help of its field."""
    found: dict[str, str] = {}
    for action in compat.parser()._actions:
        about = all_fields().get(action.dest, action).help
        found |= dict.fromkeys(action.option_strings, about or "")
    return found


def listed(asked: Sequence[Asked], read: Script) -> str:
    """Return a line for each finding, by answer, and the counts; flags that are taken are only counted."""
    times = Counter(asked)
    counts = Counter(one.answer for one in times)
    lines = []
    for answer in (*ANSWERS, BY_VALUE):
        for one, number in times.items():
            if one.answer == answer and (answer != "taken" or len(times) == 1):
                repeated = f" ({number} times)" if number > 1 else ""
                lines.append(f"{answer:8} {' '.join([one.flag, *one.values])}{repeated}: {one.reason}")
    lines.append(", ".join(f"{counts[answer]} {answer}" for answer in (*ANSWERS, BY_VALUE) if counts[answer]))
    return "\n".join([*lines, *_open_in(read)])


def rewritten(asked: Sequence[Asked], read: Script) -> str:
    """Return the command with this project's flags, and before it a comment for each flag that has no place in it.

    What the script leaves open has Megatron-LM's defaults there, which the command takes.
    """
    comments = [f"# {line}" for line in _open_in(read)]
    lines: dict[str, list[str]] = {"--defaults": ["--defaults", "megatron"]}
    for one in asked:
        typed = " ".join([one.flag, *one.values])
        if one.answer in ("refused", "unknown"):
            reason = one.reason
            if one.answer == "unknown":
                known = one.flag in megatron_flags.table()
                reason = reason.partition("; ")[2] if known else "no flag of Megatron-LM's or ours"
            comments.append(f"# {one.answer}: {typed}: {reason}")
        elif one.answer in ("taken", "alias"):
            words = [one.flag, *one.values] if one.row is None else one.row.in_place(one.values)
            for group in groups(words):
                if lines.get(group[0], group) != group:
                    comments.append(f"# given more than once, the last is kept: {' '.join(lines[group[0]])}")
                lines[group[0]] = group
    # It takes torchrun's options and, unlike a file, is found from any folder. Python's own options are left out.
    words = ["megatron-moe", "train"]
    if "RANK" in _NAMES.findall(" ".join([*read.launcher, *(setting.text for setting in read.settings)])):
        words = ["env -u RANK", *words]  # a node's number there; it would be taken for a rank that torchrun has started
    options: list[str] = []
    if read.launcher and unquoted(read.launcher[0]).endswith("torchrun"):
        options = read.launcher[1:]
    for group in groups(options):
        if parts(group)[0][2:].replace("_", "-") in _NOT_LAUNCHED:
            comments.append(f"# left out, megatron-moe train has no such option: {' '.join(group)}")
        else:
            words += group
    command = " \\\n  ".join(map(" ".join, (words, *lines.values())))
    comments += _given_by_whoever_runs(read, command)
    return "\n".join([*dict.fromkeys(comments), *_settings_for(command, read), command])


def _settings_for(command: str, read: Script) -> list[str]:
    """Return the script's lines that the command needs: its exports, the variables that it reads, a change of folder.

    PYTHONPATH is not among them: it would put Megatron-LM's modules before ours.
    """
    texts: dict[str, str] = {}
    needed, waiting = {"PYTHONPATH"}, [command]
    for setting in read.settings:
        texts[setting.name] = f"{texts.get(setting.name, '')} {setting.text}"
        if setting.always and setting.name != "PYTHONPATH":
            waiting.append(setting.text)
    while waiting:
        text = waiting.pop()
        for name in [*_NAMES.findall(text), *re.findall(r"[A-Za-z_]\w*", " ".join(_ARITHMETIC.findall(text)))]:
            if name in texts and name not in needed:
                needed.add(name)
                waiting.append(texts[name])
    lines = []
    for setting in read.settings:
        if setting.name != "PYTHONPATH" and (setting.always or setting.name in needed):
            lines.append(f"{setting.text}  # only if {setting.test}".removesuffix("  # only if "))
    return lines


def _given_by_whoever_runs(read: Script, command: str) -> list[str]:
    """Return comments on what the rewritten script takes from where it is run."""
    if not (read.launcher or read.settings):
        return []
    text = "\n".join([*_settings_for(command, read), command])
    comments = ["# run it in the folder where the script was run"]
    if arguments := sorted(set(_ARGUMENTS.findall(text))):
        comments[0] += f", with the same arguments: ${' $'.join(arguments)}"
    if re.search(r"\$\{?0\b|\bBASH_SOURCE\b", text):
        comments.append("# put it beside the script: it goes by its own path")
    known = _ALWAYS_SET.union(setting.name for setting in read.settings)
    unset: list[str] = []
    for name in dict.fromkeys(_NAMES.findall(_DEFAULTED.sub("", text))):
        if name not in known and not name.startswith("SLURM_"):
            unset.append(name)
    if unset:
        comments.append(f"# not set in the script, export them first: ${' $'.join(unset)}")
    return comments


def _open_in(read: Script) -> list[str]:
    """Return what a script's text leaves open, a line each."""
    lines = []
    if read.others:
        lines.append(_LEFT_OUT.format(read.others))
    for file in read.sourced:
        lines.append(f"not read: {file}, which the script sources; add --script for it")
    for flag, test in read.conditions.items():
        lines.append(f"only if {test}: {flag}; take it out if that does not hold")
    return lines


# The flags of a training command in a shell script's text, which is read and not run
#
# A script holds flags in arrays (`ARGS=( --a 1 )`), in quoted assignments (`ARGS="--a 1"`), and in the command itself,
# which names the others (`torchrun ... pretrain_gpt.py ${ARGS[@]}`). Words keep their text: `${VAR}` is left as it is.
# A plain list of flags is a script too.

_LEFT_OUT = "only the first training command is read; other commands that differ: {}; give each its own script"
_ASSIGNED = re.compile(r"^(?:export |local |declare |readonly )?([A-Za-z_]\w*)\+?=", re.DOTALL)
_REFERENCE = re.compile(r"\$\{?!?([A-Za-z_]\w*)")
_NAMES = re.compile(r"\$(?:\{[#!]?)?([A-Za-z_]\w*)")
_ARGUMENTS = re.compile(r"\$\{?([1-9]\d*|@)")
_DEFAULTED = re.compile(r"\$\{\w+:?[-=+][^{}]*\}")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_DECLARING = frozenset("export declare local readonly typeset env then else do".split())
_ALWAYS_SET = frozenset("HOME PWD USER HOSTNAME BASH_SOURCE RANDOM".split())
_NOT_LAUNCHED = frozenset("max-restarts start-method no-python run-path logs-specs use-env".split())
"""Options of torchrun's that `megatron-moe train` refuses."""
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_BREAK = re.compile(r"[\s;<>]|\|[\s|]|\|\Z")  # a bar within a word is a pipeline layout's
_PAIRS = {"{": "}", "(": ")"}
_LAUNCHERS = frozenset(
    "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone max-restarts monitor-interval"
    " start-method role module no-python run-path log-dir redirects tee local-ranks-filter node-rank master-addr"
    " master-port local-addr logs-specs use-env".split()
)
"""Flags of torchrun, also where an array holds them."""


@dataclass(frozen=True)
class Word:
    """A word of a script: its raw text with quotes, and whether a command or an array ends before it.

    `inside` is the text of an array that the word opens (`NAME=(`...).
    """

    text: str
    first: bool
    inside: str | None = None


@dataclass(frozen=True)
class Setting:
    """A line of a script that gives a variable its value or, without a name, changes the folder.

    Args:
        always: whether the training needs it even if its command does not name it: an export.
        test: of the `if` that it stands in; nothing outside of one.
    """

    name: str
    text: str
    always: bool
    test: str


@dataclass
class Script:
    """What a script's text says.

    Attributes:
        flags: each flag with its values, as typed, in the order of the text.
        launcher: the words that start the program, as typed, with the arrays that they name put in; empty where the
            text has none.
        conditions: the flags that stand in an `if`, with its test: whether they are there depends on it.
        variables: the simple assignments, name -> text.
        settings: all assignments and changes of the folder before the training command, as typed.
        sourced: files that the script reads, whose flags are not here.
        others: training commands after the first one that differ from it, whose flags are not here either.
    """

    flags: list[tuple[str, list[str]]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    conditions: dict[str, str] = field(default_factory=dict)
    sourced: list[str] = field(default_factory=list)
    others: int = 0

    def resolved(self, text: str, depth: int = 5) -> str:
        """Return a word without quotes, with the variables that the script assigns put in."""

        def put_in(match: re.Match[str]) -> str:
            default = match[0] if match[2] is None else match[2]
            return self.variables.get(match[1] or match[3], default)

        found = unquoted(text)
        for _ in range(depth):
            found = re.sub(r"\$\{([A-Za-z_]\w*)(?::-([^{}]*))?\}|\$([A-Za-z_]\w*)", put_in, found)
        return unquoted(found)


def unquoted(text: str) -> str:
    """Return a word's text without the quotes around it and without backslashes before other characters."""
    for quote in "'\"":
        if len(text) > 1 and text[0] == text[-1] == quote and quote not in text[1:-1]:
            return text[1:-1]
    return re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)['\"]", "", text))


def read_script(text: str) -> Script:
    """Return the flags of the training command in a script's text, those of the arrays it names included."""
    script = Script()
    held: dict[str, list[str]] = {}  # lists of words with flags in them
    ranked: dict[int, list[tuple[list[str], list[str]]]] = {}  # how near to a training program -> flags and launchers
    tests: list[str] = []  # of the `if`s that the command stands in, the innermost last
    for command in _commands(text):
        texts = [word.text for word in command]
        first, rest = texts[0], " ".join(texts[1:])
        if first == "if":
            tests.append(rest)
        elif tests and first in ("elif", "else", "fi"):
            last = tests.pop()
            if first != "fi":
                tests.append(rest if first == "elif" else f"not {last}")
        for word in command:
            match = _ASSIGNED.match(word.text)
            if match is None:
                continue
            inside = word.inside
            if inside is None:
                inside = unquoted(word.text[match.end() :])
                own_default = re.fullmatch(rf"\$\{{{match[1]}:?-(.*)\}}", inside, re.DOTALL)  # NAME=${NAME:-value}
                script.variables[match[1]] = inside if own_default is None else own_default[1]
            words = [found.text for found in _words(inside, in_list=True)]
            if any(is_flag(found) or found.startswith("$") for found in words):
                held.setdefault(match[1], []).extend(words)
                if tests:
                    script.conditions |= dict.fromkeys(dict(_flags(words)), " and ".join(tests))
        program = _first(texts, r"\.py\Z")
        trains = program < len(texts) and "train" in unquoted(texts[program]).rpartition("/")[2]
        if not ranked.get(0):  # what follows the training command is not for it
            script.settings += _settings_in(command, trains, " and ".join(tests))
        if unquoted(first) in ("source", ".") and rest:
            script.sourced.append(unquoted(texts[1]))
        elif program < len(texts):
            launcher = texts[_first(texts[:program], r"(^|/)(torchrun|python[\d.]*)$") : program]
            if launcher[1:3] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
                launcher = ["torchrun", *launcher[3:]]
            ranked.setdefault(0 if trains else 2, []).append((texts[program + 1 :], launcher))
        elif is_flag(first) or first.startswith("$"):
            ranked.setdefault(1, []).append((texts, []))
    chosen = ranked.get(min(ranked, default=0), [])
    if ranked.get(0):  # alternatives, or stages one after the other: their flags together are no one's command
        script.others = sum(command != chosen[0] for command in chosen)
        chosen = chosen[:1]
    named: set[str] = set()
    for words, _ in chosen:
        named |= _references(words, held)
    lists = []
    for name, words in held.items():
        if name in named or not (named or 0 in ranked):
            lists.append(words)
    for words in [*lists, *map(itemgetter(0), chosen)]:
        kept = []
        for text in words:  # not a variable that holds flags, as in `--seed 1 $ARGS`: it is no value of `--seed`
            is_alone = re.fullmatch(r"\$(\w+|\{\w+\})", unquoted(text))
            if not is_alone or not any(any(map(is_flag, held[name])) for name in _references([text], held)):
                kept.append(text)
        script.flags += _flags(kept)
    for _, launcher in chosen[:1]:
        for text in launcher:
            script.launcher += _with_arrays(text, held)
    return script


def _settings_in(command: list[Word], trains: bool, test: str) -> Iterator[Setting]:
    """Yield what a command sets; assignments before a program are for it alone, and matter if it is the training."""
    texts = [word.text for word in command]
    if texts[0] == "cd":
        yield Setting("", " ".join(texts), not test, test)
    begin = 0
    while begin < len(texts) and (texts[begin] in _DECLARING or _ASSIGNED.match(texts[begin])):
        begin += 1
    exported = "export" in texts or begin < len(texts)
    if begin < len(texts) and not trains and "export" not in texts[:begin]:
        return
    for word in command[: begin if trains else len(command)]:
        match = _ASSIGNED.match(word.text)
        name = match[1] if match else word.text
        if match is None and not (exported and "export" in texts and name.isidentifier() and name not in _DECLARING):
            continue
        value = word.text
        if word.inside is not None:
            value = f"{word.text}({word.inside})"
        if exported:
            value = f"export {value}"
        holds_flags = match is not None and any(map(is_flag, unquoted(word.text[match.end() :]).split()))
        yield Setting(name, value, exported and not holds_flags, test)


def _first(words: list[str], pattern: str) -> int:
    """Return the number of the first word whose text without quotes has the pattern; how many there are without one."""
    for number, word in enumerate(words):
        if re.search(pattern, unquoted(word)):
            return number
    return len(words)


def read_test_case(text: str, file: str) -> Script:
    """Return the flags of a functional test of Megatron-LM's, the mapping MODEL_ARGS of its YAML file.

    Raises:
        ConfigError: the text is not YAML; the message names the file.
    """
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"--script {file}: is not YAML: {' '.join(str(error).split())}") from None
    arguments = content.get("MODEL_ARGS") if isinstance(content, dict) else None
    script = Script()
    if not isinstance(arguments, dict):
        return script
    for flag, value in arguments.items():
        if value is False:
            continue
        words = []
        if value is not True:
            words = str(value).split()
        for at, word in enumerate(words):
            if not re.fullmatch(r"[\w./,:=${}@%+-]+", word):  # a shell would read it otherwise without quotes
                words[at] = f'"{word}"'
        script.flags.append((str(flag), words))
    return script


def _with_arrays(word: str, held: dict[str, list[str]]) -> list[str]:
    """Return the words of an array that a word stands for, or the word itself."""
    named = _REFERENCE.search(word)
    if named is None or named[1] not in held or unquoted(word).strip("${}[@]*!") != named[1]:
        return [word]
    words = []
    for inner in held[named[1]]:
        words += _with_arrays(inner, held)
    return words


def _flags(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    for group in groups(words):
        flag, values = parts(group)
        if is_flag(group[0]) and "$" not in flag and flag[2:].replace("_", "-") not in _LAUNCHERS:
            yield flag, [value for value in values if not re.search(r"\[[@*]\]", value)]


def _references(words: list[str], held: dict[str, list[str]]) -> set[str]:
    """Return the names of the lists that words name, and that those name in turn."""
    found: set[str] = set()
    waiting = list(words)
    while waiting:
        for name in _REFERENCE.findall(waiting.pop()):
            if name in held and name not in found:
                found.add(name)
                waiting += held[name]
    return found


def _commands(text: str) -> Iterator[list[Word]]:
    """Yield the words of each command; those of an `eval` or a `... bash -c` are read from its string."""
    command: list[Word] = []
    for word in [*_words(text), Word("", True)]:
        if word.first and command:
            texts = [unquoted(each.text) for each in command]
            at = 2
            while at < len(texts) and not (texts[at - 1] == "-c" and texts[at - 2].endswith("sh")):
                at += 1
            if texts[0] == "eval":
                yield from _commands(" ".join(texts[1:]))
            elif at < len(texts):
                yield from _commands(texts[at])
            else:
                yield command
            command = []
        if word.text:
            command.append(word)


def _words(text: str, in_list: bool = False) -> Iterator[Word]:
    """Yield the words of a shell text; a line ends a command, unless `in_list`."""
    at, first = 0, True
    waiting: list[str] = []
    text = text.replace("\\\r\n", "  ").replace("\\\n", "  ")
    previous = ""
    while at < len(text):
        character = text[at]
        if character == "\n" and waiting:
            end_mark = re.compile(rf"^\t*{re.escape(waiting.pop(0))}[ \t]*$", re.MULTILINE)
            ended = end_mark.search(text, at + 1)
            at = len(text) if ended is None else ended.end()
        if character == "#":
            at = (text + "\n").index("\n", at)
        elif (match := _HEREDOC.match(text, at)) and not in_list:
            waiting.append(match[2])
            at = match.end()
        elif character in " \t\r" or (character == "\n" and in_list):
            at += 1
        elif redirect := re.match(r"[0-9&]*[<>]+(?!\()&?[0-9-]*[ \t]*[^\s;|&()]*", text[at:]):
            at += redirect.end()
        elif character in "\n;&|" or (character in "()" and not (character == "(" and is_flag(previous))):
            at, first = at + 1, True
        else:
            end, inside = _end_of_word(text, at)
            previous = opened = text[at:end]
            if inside is not None:
                previous, opened = "", text[at : text.index("(", at)]
            yield Word(opened, first, inside)
            at, first = end, False


def _end_of_word(text: str, at: int) -> tuple[int, str | None]:
    """Return where a word ends, and the text of the array that it opens, if it does."""
    begin, depth = at, 0
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 2
        elif character in "'\"`":
            at = _after_quote(text, at)
        elif character == "$" and text[at + 1 : at + 2] in _PAIRS:
            at = _after_pair(text, at + 1)
        elif character == "(" and depth == 0 and _ASSIGNED.fullmatch(text[begin:at]):
            end = _after_pair(text, at)
            return end, text[at + 1 : end - 1]
        elif _BREAK.match(text, at) or (character in ")&" and not depth):
            break
        else:
            depth += (character == "(") - (character == ")")
            at += 1
    return min(at, len(text)), None


def _after_quote(text: str, at: int) -> int:
    """Return the place after the quoted text that begins here."""
    quote, at = text[at], at + 1
    while at < len(text) and text[at] != quote:
        at += 2 if text[at] == "\\" and quote != "'" else 1
    return at + 1


def _after_pair(text: str, at: int) -> int:
    """Return the place after the bracket that closes the one here; quotes and comments inside are passed over."""
    opening, depth = text[at], 0
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 2
            continue
        if character in "'\"`":
            at = _after_quote(text, at)
            continue
        if character == "#" and opening == "(" and text[at - 1] in " \t\n(":
            at = (text + "\n").index("\n", at)
            continue
        depth += (character == opening) - (character == _PAIRS[opening])
        at += 1
        if depth == 0:
            break
    return at
