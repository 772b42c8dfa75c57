"""Makes the pictures of README and docs again: python3 docs/pictures/make.py FORNAX [CHROMIUM]

FORNAX is the binary. Needs tmux, Chromium and the Python package playwright. Everything that is shown was answered by the default
model while the picture was made; nothing is made up.
"""

import contextlib
import html
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from playwright.sync_api import expect, sync_playwright

FOLDER = pathlib.Path(__file__).parent
fornax = str(pathlib.Path(sys.argv[1]).resolve())
chromium = sys.argv[2] if len(sys.argv) > 2 else "/usr/bin/chromium"
COLUMNS, ROWS = 92, 30
PATIENCE = 120


def wait_for(what):
    """Looks until something is there, for as long as a slow machine may take."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.2)
    raise TimeoutError


# The terminal: what tmux shows, as SVG.

COLORS = ["#1e1e1e", "#f07178", "#9ece6a", "#e0af68", "#7aa2f7", "#bb9af7", "#7dcfff", "#d8d4cf"]
GROUND, INK, FAINT = "#171513", "#ece7e2", "#9b928a"


PLAIN = {"fill": INK, "weight": "normal", "style": "normal"}


def spans(line, look):
    """Runs of a line with one look, from its escape sequences; `look` is carried from line to line."""
    for escape, text in re.findall(r"(\x1b\[[0-9;]*m)|([^\x1b]+)", line):
        if text:
            yield dict(look), text
            continue
        codes = [int(code or 0) for code in escape[2:-1].split(";")]
        for code in codes:
            if code == 0:
                look.update(PLAIN)
            elif code == 1:
                look["weight"] = "bold"
            elif code == 2:
                look["fill"] = FAINT
            elif code == 3:
                look["style"] = "italic"
            elif code in (22, 23):
                look["weight" if code == 22 else "style"] = "normal"
            elif code == 39:
                look["fill"] = INK
            elif 30 <= code <= 37:
                look["fill"] = COLORS[code - 30]
            elif 90 <= code <= 97:
                look["fill"] = FAINT if code == 90 else COLORS[code - 90]


def svg(screen):
    lines = screen.rstrip("\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    wide, high, line_high = COLUMNS * 8.43 + 40, len(lines) * 20 + 62, 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{high}" viewBox="0 0 {wide:.0f} {high}" role="img">',
        "<title>A chat in the terminal</title>",
        f'<rect width="{wide:.0f}" height="{high}" rx="10" fill="{GROUND}"/>',
    ]
    parts += [f'<circle cx="{24 + 20 * at}" cy="21" r="6" fill="{color}"/>' for at, color in enumerate(["#e8682a", "#e0af68", "#9ece6a"])]
    parts.append('<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="14" xml:space="preserve">')
    carried = dict(PLAIN)
    for number, line in enumerate(lines):
        column = 0
        for look, text in spans(line, carried):
            # Each run stands where a terminal's grid has it, whatever font a viewer takes.
            extra = "".join(
                f' font-{name}="{look[name]}"' for name in ("weight", "style") if look[name] != "normal"
            )
            # Spaces at its ends are left out: viewers differ in what they make of them.
            shown = text.strip()
            if shown:
                x = 20 + (column + len(text) - len(text.lstrip())) * 8.43
                parts.append(
                    f'<text x="{x:.1f}" y="{58 + number * line_high}" fill="{look["fill"]}"{extra} '
                    f'textLength="{len(shown) * 8.43:.1f}">{html.escape(shown)}</text>'
                )
            column += len(text)
    return "\n".join(parts + ["</g>", "</svg>"]) + "\n"


def terminal():
    def tmux(*words):
        command = ["tmux", "-L", "fornax-pictures", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def screen():
        return tmux("capture-pane", "-p", "-t", "picture")

    shell = ["env", "PS1=$ ", "TERM=tmux-256color", "bash", "--norc", "--noprofile"]
    tmux("-f", "/dev/null", "new-session", "-d", "-s", "picture", "-x", str(COLUMNS), "-y", str(ROWS), *shell)
    try:
        tmux("send-keys", "-t", "picture", f"alias fornax='{fornax}'; clear", "Enter")
        tmux("send-keys", "-t", "picture", "fornax run smollm2 --device cpu --temperature 0 --seed 7 --no-history --max-tokens 130", "Enter")
        wait_for(lambda: re.search(r"(?m)^[>»❯] ?$", screen()))
        for number, question in enumerate(["What is the capital of France?", "Write a Python function that adds two numbers."]):
            tmux("send-keys", "-t", "picture", question, "Enter")
            wait_for(lambda: len(re.findall(r"tok/s; prompt", screen())) > number)
            wait_for(lambda: re.search(r"(?m)^[>»❯] ?$", screen()))
        (FOLDER / "terminal.svg").write_text(svg(tmux("capture-pane", "-e", "-p", "-t", "picture")))
    finally:
        tmux("kill-server")


# The console: a real server with a real model.


def console(base):
    def call(path, body):
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base}{path}", data, headers)) as response:
            return json.load(response)

    def ask(page, text):
        page.fill("#question", text)
        page.keyboard.press("Enter")
        expect(page.locator("#progress")).to_have_text("The answer is complete", timeout=PATIENCE * 1000)

    def shot(page, name):
        page.wait_for_timeout(500)
        page.screenshot(path=FOLDER / f"{name}.png")

    def at(page, theme, wide, high):
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": wide, "height": high})

    with sync_playwright() as playwright:
        # Containers run as root, where Chromium's own sandbox does not start.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 760}, color_scheme="light")
        page.goto(f"{base}/")
        expect(page.locator("#empty-model")).not_to_be_empty()
        for theme, phone in [("light", False), ("dark", True)]:
            at(page, theme, *((390, 760) if phone else (1200, 760)))
            shot(page, f"console-empty-{'phone-' if phone else ''}{theme}")
        at(page, "light", 1200, 760)
        page.click("#show-settings")
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "170")
        page.click("#hide-settings")
        ask(page, "What is the capital of France?")
        page.click("#new")
        ask(page, "Write a Python function that tells whether a word is a palindrome.")
        page.evaluate("document.activeElement.blur()")
        shot(page, "console-chat-light")
        at(page, "dark", 1200, 760)
        shot(page, "console-chat-dark")
        at(page, "dark", 390, 760)
        shot(page, "console-chat-phone-dark")
        at(page, "light", 390, 760)
        shot(page, "console-chat-phone-light")
        at(page, "light", 1200, 760)

        # The engine with work to do: four answers at once that begin alike, and two that wait.
        rules = "You are the clerk of a small bakery. Answer in full sentences, kindly and to the point. " * 6
        questions = ["bread", "cakes", "opening hours", "allergens", "deliveries", "weddings"]

        def work(topic):
            said = [{"role": "system", "content": rules}, {"role": "user", "content": f"Tell me all about {topic}."}]
            body = {"messages": said, "max_tokens": 900, "ignore_eos": True, "temperature": 0.8, "seed": 1}
            # The server ends when the pictures are taken, and with it what is answered.
            with contextlib.suppress(OSError):
                call("/v1/chat/completions", body)

        threads = [threading.Thread(target=work, args=[topic], daemon=True) for topic in questions]
        for thread in threads:
            thread.start()
        page.click("nav a[data-view=engine]")
        expect(page.locator("#requests tbody tr")).to_have_count(len(questions), timeout=PATIENCE * 1000)
        expect(page.locator("dd[data-fact='Tokens/s']")).to_have_text(re.compile(r"[1-9]"), timeout=PATIENCE * 1000)
        page.wait_for_timeout(6000)
        at(page, "light", 1200, 860)
        shot(page, "engine")
        at(page, "dark", 1200, 860)
        shot(page, "engine-dark")
        at(page, "dark", 390, 760)
        shot(page, "engine-phone-dark")
        browser.close()


with tempfile.TemporaryDirectory() as folder:
    terminal()
    command = [fornax, "serve", "smollm2", "--port", "0", "--context", "2048", "--parallel", "4", "--jobs-db", f"{folder}/jobs.db"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        base = serving.stdout.readline().strip().removeprefix("listening on ")

        def is_ready():
            try:
                return urllib.request.urlopen(f"{base}/ready").status == 200
            except OSError:
                return False

        wait_for(is_ready)
        console(base)
    finally:
        serving.terminate()
        serving.wait()
