"""Grammars of llama.cpp's own test, with texts that they accept and refuse: python make_grammars.py TEST_CPP OUT_JSON.

TEST_CPP is `tests/test-grammar-integration.cpp` of llama.cpp. Nothing of it is committed: `cargo xtask prove templates` fetches
it, and `grammars_of_llama_cpp_accept_what_they_should` reads what is written here.
"""

import json
import re
import sys

source = open(sys.argv[1], encoding="utf-8").read()
LITERAL = re.compile(r'R"""\((.*?)\)"""|"((?:\\.|[^"\\])*)"', re.S)
SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "0": "\0"}


def unescaped(text):
    """A C++ string without its escapes, of which the hexadecimal ones are bytes."""
    raw = re.sub(rb"\\x([0-9a-fA-F]{1,2})", lambda found: bytes([int(found[1], 16)]), text.encode())
    return re.sub(r"\\(.)", lambda found: SIMPLE[found[1]], raw.decode())


def literals(text):
    """The strings of a piece of C++, those that follow each other joined."""
    text = re.sub(r"(?m)^\s*//.*$|(?<=[,{])\s*//[^\n\"]*$", "", text)
    found, end = [], None
    for literal in LITERAL.finditer(text):
        value = literal[1] if literal[1] is not None else unescaped(literal[2])
        if end is not None and not text[end : literal.start()].strip():
            found[-1] += value
        else:
            found.append(value)
        end = literal.end()
    return found


def balanced(text, start, opening, closing):
    """Where what opens at `start` closes; strings are passed over."""
    depth, at = 0, start
    while at < len(text):
        literal = LITERAL.match(text, at)
        if literal:
            at = literal.end()
            continue
        if text.startswith("//", at):
            at = text.index("\n", at)
            continue
        depth += {opening: 1, closing: -1}.get(text[at], 0)
        if not depth:
            return at
        at += 1
    raise ValueError("it never closes")


cases = []
for call in re.finditer(r"\n\s+test_grammar\(", source):
    start = call.end() - 1
    body = source[start + 1 : balanced(source, start, "(", ")")]
    first = None
    lists = []
    at = 0
    while at < len(body):
        literal = LITERAL.match(body, at)
        if literal:
            at = literal.end()
            continue
        if body.startswith("//", at):
            at = body.index("\n", at)
            continue
        if body[at] == "{":
            end = balanced(body, at, "{", "}")
            if first is None:
                first = at
            lists.append(literals(body[at + 1 : end]))
            at = end
        at += 1
    named = literals(body[:first])
    if len(named) != 2 or len(lists) != 2:
        raise ValueError(f"a test is written in another way: {body[:200]}")
    cases.append({"name": named[0], "grammar": named[1], "passing": lists[0], "failing": lists[1]})
assert len(cases) >= 12, len(cases)
json.dump(cases, open(sys.argv[2], "w"), ensure_ascii=False)
print(f"{len(cases)} grammars, {sum(len(case['passing']) + len(case['failing']) for case in cases)} texts")
