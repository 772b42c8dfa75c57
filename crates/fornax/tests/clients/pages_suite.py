"""Other pages' scripts in a real browser: python pages_suite.py BASE_URL KEY MODEL CHROMIUM PORT. Prints `ok NAME` for each
scenario. PORT is that of a page whose origin may call the server; a page of another port may not."""

import functools
import http.server
import re
import sys
import threading
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

base, key, model, chromium, port = sys.argv[1:6]

# What openai and @anthropic-ai/sdk send from a browser, with everything that they add by themselves.
SENT = {
    "openai": ("/v1/chat/completions", {
        "accept": "application/json", "content-type": "application/json", "authorization": f"Bearer {key}",
        "x-stainless-arch": "unknown", "x-stainless-lang": "js", "x-stainless-os": "Unknown",
        "x-stainless-package-version": "6.9.1", "x-stainless-retry-count": "0", "x-stainless-runtime": "browser:chrome",
        "x-stainless-runtime-version": "142.0.0", "x-stainless-timeout": "600",
    }, {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
    "anthropic": ("/v1/messages", {
        "accept": "application/json", "content-type": "application/json", "x-api-key": key,
        "anthropic-version": "2023-06-01", "anthropic-dangerous-direct-browser-access": "true",
        "x-stainless-helper-method": "stream", "x-stainless-lang": "js",
    }, {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
}
FETCH = """async ([url, headers, body]) => {
    try {
        const answer = await fetch(url, {method: "POST", headers, body: JSON.stringify(body)});
        return [answer.status, (await answer.json()).usage !== undefined, answer.headers.get("x-request-id") !== null];
    } catch (error) {
        return String(error);
    }
}"""


CHAT = Path(__file__).parents[4] / "examples/chat/index.html"


class Page(http.server.BaseHTTPRequestHandler):
    """An empty page, and the example of a chat."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(CHAT.read_bytes() if self.path == "/chat" else b"<!doctype html><title>a page</title>")

    def log_message(self, *_):
        pass


def page_at(number):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", number), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/"


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    may, may_not = page_at(int(port)), page_at(0)
    page = browser.new_page()
    for name, (path, headers, body) in SENT.items():
        call = functools.partial(page.evaluate, FETCH, [base + path, headers, body])
        page.goto(may)
        assert call() == [200, True, True], (name, call())
        page.goto(may_not)
        assert "TypeError" in call(), (name, call())
        print(f"ok {name}", flush=True)
    # The chat app of the examples.
    page.goto(f"{may}chat")
    page.locator("summary").click()
    page.fill("#server", base)
    page.fill("#key", key)
    page.fill("#question", "What is the capital of France?")
    page.keyboard.press("Enter")
    # What it says is drawn at random.
    expect(page.locator("#said .assistant")).to_have_text(re.compile(r"\w"), timeout=90_000)
    expect(page.locator("#stop")).to_be_disabled(timeout=90_000)
    print("ok chat app", flush=True)
    browser.close()
