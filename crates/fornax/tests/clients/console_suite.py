"""The console in a real browser: python console_suite.py BASE_URL KEY CHROMIUM FOLDER. Prints `ok NAME` for each scenario;
screenshots go into the folder."""

import base64
import json
import re
import sys
import threading
import urllib.request
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

base, key, chromium, folder = sys.argv[1:5]
folder = Path(folder)
folder.mkdir(parents=True, exist_ok=True)
# Loading and answering share the machine with every other test.
PATIENCE = 90_000
expect.set_options(timeout=PATIENCE)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fruit", "metal"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
# What would be markup if it were ever shown as such.
MARKUP = "<img src=x onerror=document.title='broken'>"


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base}{path}", data, headers)) as response:
        return json.load(response)


def ask(page, text):
    """Types a question and waits for the end of its answer."""
    page.fill("#question", text)
    page.keyboard.press("Enter")
    answered(page)


def answered(page, said="The answer is complete"):
    expect(page.locator("#progress")).to_have_text(said)
    expect(page.locator("#send")).to_be_visible()


def answers(page):
    return page.locator(".message.assistant .text")


def tool(page, name, last=True):
    """Presses what stands below a message."""
    buttons = page.locator("#messages").get_by_role("button", name=name, exact=True)
    (buttons.last if last else buttons.first).click()


def parameters(page, is_open=True):
    if page.locator("#parameters").is_visible() != is_open:
        page.click("#show-settings")
    expect(page.locator("#parameters")).to_be_visible(visible=is_open)


def reload(page):
    """Loads the page anew, once what it writes down is written: a look comes behind the writing before it."""
    page.evaluate("import('/console/store.js').then(({ all }) => all()).then((found) => found.length)")
    page.reload()


def accessible(page, name):
    """No serious or critical finding of axe-core, in either theme; a screenshot of each."""
    for theme in ["light", "dark"]:
        page.select_option("#theme", theme)
        page.screenshot(path=folder / f"{name}-{theme}.png")
        found = Axe().run(page).response["violations"]
        bad = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert not bad, (name, theme, bad)
    page.select_option("#theme", "")


def events(*deltas, usage=None):
    """A stream of chat completions."""
    parts = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if usage:
        parts.append({"choices": [], "usage": usage})
    lines = [json.dumps(part) for part in parts] + ["[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines)


class Scripted:
    """Answers in the model's place, for what the model of these tests would never say."""

    def __init__(self, page, *said):
        self.page, self.said, self.asked = page, list(said), []

    def __enter__(self):
        def respond(route):
            self.asked.append(route.request.post_data_json)
            said = self.said[min(len(self.asked), len(self.said)) - 1]
            route.fulfill(content_type="text/event-stream", body=said)

        self.page.route("**/v1/chat/completions", respond)
        return self

    def __exit__(self, *_):
        self.page.unroute("**/v1/chat/completions")


# A stream that comes slowly: `pieces` are deltas, and what was sent stays in `window.slow` to be looked at.
SLOWLY = r"""([pieces, pause]) => {
    const real = window.realFetch ??= window.fetch;
    window.slow = { sent: 0, isDone: false };
    window.fetch = (path, options) => {
        if (path !== "/v1/chat/completions") return real(path, options);
        window.fetch = real;
        const code = new TextEncoder();
        let timer;
        const body = new ReadableStream({
            start(controller) {
                options.signal?.addEventListener("abort", () => {
                    clearInterval(timer);
                    controller.error(new DOMException("stopped", "AbortError"));
                });
                timer = setInterval(() => {
                    const delta = pieces[window.slow.sent];
                    if (delta) {
                        const part = { choices: [{ index: 0, delta, finish_reason: null }] };
                        controller.enqueue(code.encode(`data: ${JSON.stringify(part)}\n\n`));
                        window.slow.sent += 1;
                    } else {
                        clearInterval(timer);
                        window.slow.isDone = true;
                        controller.enqueue(code.encode("data: [DONE]\n\n"));
                        controller.close();
                    }
                }, pause);
            },
        });
        return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
    };
}"""


# The chat.


def the_page_asks_for_a_key(page):
    page.goto(f"{base}/")
    expect(page.locator("#access")).to_be_visible()
    page.screenshot(path=folder / "key.png")
    page.fill("#key", "a-wrong-key-0123456789")
    page.keyboard.press("Enter")
    expect(page.locator("#access-error")).to_have_text("The server does not know this key.")
    # Escape leads nowhere: there is nothing to see without a key.
    page.keyboard.press("Escape")
    expect(page.locator("#access")).to_be_visible()
    page.fill("#key", key)
    page.keyboard.press("Enter")
    expect(page.locator("#access")).to_be_hidden()
    expect(page.locator("#status")).to_have_text("ready")
    # In this tab, and nowhere that outlives it.
    assert page.evaluate("sessionStorage.getItem('key')") == key
    assert key not in page.evaluate("JSON.stringify(localStorage) + document.cookie")


def a_question_is_answered_as_it_is_made(page):
    expect(page.locator("#empty-model")).to_have_text("smollm2, 1,024 tokens of context")
    expect(page.locator("#suggestions button")).to_have_count(4)
    accessible(page, "empty")
    parameters(page)
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "40")
    parameters(page, False)
    ask(page, "What is the capital of France?")
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("Paris")
    figures = page.locator(".message.assistant .figures")
    expect(figures).to_contain_text("tokens/s")
    # It is announced once it is whole.
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "false")
    # How full the context is stands beside the question.
    expect(page.locator("#context-words")).to_have_text(re.compile(r"^\d+ of 1,024 tokens$"))
    # The second question finds the first in the cache, and says where that ends.
    ask(page, "And of Italy?")
    expect(figures.last).to_contain_text(re.compile(r"[1-9]\d* of them cached"))
    accessible(page, "chat")


def answers_and_questions_have_versions(page):
    first = answers(page).first.inner_text()
    parameters(page)
    page.fill("#temperature", "1")
    parameters(page, False)
    tool(page, "Answer again")
    answered(page)
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator(".places")).to_have_text(["2/2"])
    # The earlier version is still there.
    tool(page, "Earlier version")
    expect(page.locator(".places")).to_have_text(["1/2"])
    parameters(page)
    page.fill("#temperature", "0")
    parameters(page, False)
    tool(page, "Edit and ask again", last=False)
    page.get_by_label("Edited message").fill("What is the capital of Japan?")
    page.get_by_role("button", name="Ask this instead").click()
    answered(page)
    expect(page.locator(".message.user .text")).to_have_text(["What is the capital of Japan?"])
    expect(answers(page)).to_contain_text("Tokyo")
    # The conversation as it was before is a step away, with all that followed.
    tool(page, "Earlier version", last=False)
    expect(page.locator(".message")).to_have_count(4)
    assert answers(page).first.inner_text() == first
    # All of it outlives the page.
    reload(page)
    expect(page.locator(".message")).to_have_count(4)
    expect(page.locator(".places")).to_have_text(["1/2", "2/2"])
    tool(page, "Later version", last=False)
    expect(answers(page)).to_contain_text("Tokyo")
    expect(page.locator("#temperature")).to_have_value("0")


def go_on(route):
    """Asks for an answer that ends with its number of tokens only."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))


def an_answer_is_stopped_gone_on_with_and_deleted(page):
    parameters(page)
    page.fill("#max_tokens", "")
    parameters(page, False)
    page.click("#new")
    # The model ends its answer when it likes, at times before a click. Here it goes on until it is stopped.
    page.route("**/v1/chat/completions", go_on)
    page.fill("#question", "Count from 1 to 1000, every number.")
    # Within the page, as soon as there is text: on a busy machine the answer may end before a click from here arrives.
    page.evaluate(
        """() => {
            const stop = document.querySelector("#stop");
            const whenText = (_, observer) => {
                if (!document.querySelector(".message.assistant .text")?.textContent || stop.hidden) return;
                observer.disconnect();
                stop.click();
            };
            const all = { subtree: true, childList: true, characterData: true, attributes: true };
            new MutationObserver(whenText).observe(document.body, all);
        }"""
    )
    page.click("#send")
    answered(page, "Stopped")
    expect(answers(page)).not_to_be_empty()
    expect(page.locator(".message.assistant .figures")).to_contain_text("stopped")
    # The server has let go of it too.
    page.wait_for_function(
        """async (key) => {
            const response = await fetch("/health", { headers: { Authorization: `Bearer ${key}` } });
            return (await response.json()).running === 0;
        }""",
        arg=key,
    )
    parameters(page)
    page.fill("#max_tokens", "12")
    parameters(page, False)
    so_far = answers(page).inner_text()
    tool(page, "Continue this answer")
    answered(page)
    went_on = answers(page).inner_text()
    assert went_on.startswith(so_far.rstrip()) and len(went_on) > len(so_far), (so_far, went_on)
    page.unroute("**/v1/chat/completions", go_on)
    expect(page.locator(".message")).to_have_count(2)
    tool(page, "Delete this and what follows")
    expect(page.locator(".message")).to_have_count(1)
    page.locator("#said").get_by_role("button", name="Undo").click()
    expect(page.locator(".message")).to_have_count(2)
    parameters(page)
    page.fill("#max_tokens", "40")
    parameters(page, False)


def an_answer_has_the_form_of_a_schema(page):
    page.click("#new")
    parameters(page)
    page.check("#structured")
    page.fill("#schema", "{ not json")
    expect(page.locator("#schema-error")).to_contain_text("The schema is no JSON")
    parameters(page, False)
    page.fill("#question", "Is an apple a fruit or a metal?")
    sent = []
    page.on("request", lambda request: "completions" in request.url and sent.append(request.url))
    page.click("#send")
    # Said beside the question, which stays where it is; nothing was sent, and what is wrong is open.
    expect(page.locator("#ask-error")).to_contain_text("The schema is no JSON")
    expect(page.locator("#ask-error")).to_be_in_viewport()
    expect(page.locator("#question")).to_have_value("Is an apple a fruit or a metal?")
    expect(page.locator("#schema")).to_be_focused()
    expect(page.locator(".message")).to_have_count(0)
    assert not sent
    accessible(page, "schema")
    page.fill("#schema", json.dumps(SCHEMA))
    expect(page.locator("#schema-error")).to_be_empty()
    page.focus("#question")
    page.keyboard.press("Enter")
    answered(page)
    assert json.loads(answers(page).inner_text())["kind"] in ["fruit", "metal"]
    # What the server refuses is said, with its code, and can be tried again.
    page.fill("#schema", json.dumps({"type": "colour"}))
    page.fill("#question", "Which colour?")
    page.click("#send")
    expect(page.locator(".message.assistant .error")).to_contain_text("SCHEMA_UNSUPPORTED")
    # Markup stays text.
    page.fill("#schema", json.dumps({"enum": [MARKUP]}))
    page.get_by_role("button", name="Try again").click()
    answered(page)
    assert json.loads(answers(page).last.inner_text()) == MARKUP
    assert page.title() == "Fornax"
    page.uncheck("#structured")
    parameters(page, False)


def markdown_becomes_nodes_and_never_markup(page):
    def rendered(text):
        return page.evaluate(
            """async (text) => {
                const { render } = await import("/console/markdown.js");
                const host = document.createElement("div");
                host.append(...render(text));
                return [host.innerHTML, host.textContent];
            }""",
            text,
        )

    html, text = rendered(f"# Title\n\nA **bold** `code` *word*, snake_case_name, 2 * 3 * 4.\n\n- one\n- two\n\n{MARKUP}")
    assert ">Title</h4>" in html and "<strong>bold</strong>" in html and ">code</code>" in html, html
    assert "<em>word</em>" in html and "snake_case_name, 2 * 3 * 4." in html and html.count("<li") == 2, html
    assert "<img" not in html and MARKUP in text, html
    html, text = rendered("[a](javascript:alert(1)) [b](https://example.org/x) <script>alert(1)</script> ![p](https://example.org/i.png)")
    assert html.count("<a ") == 2 and 'href="https://example.org/x"' in html and "<script" not in html, html
    assert "<img" not in html and "picture: p" in text, html
    html, _ = rendered("```js\n<b>1</b>\n```\nfollows:\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n1. x\n2. y\n\n> q")
    assert "&lt;b&gt;" in html and html.count("<td") == 2 and "<ol" in html and "<blockquote" in html, html
    # A task list, struck words, an address on its own; code in a list without the list's indentation.
    html, text = rendered("- [x] done\n- [ ] open\n- code:\n  ```py\n  if x:\n      y\n  ```\n\n~~old~~ https://example.org/y")
    assert text.count("☑") == 1 and text.count("☐") == 1 and "<s>old</s>" in html, html
    assert "if x:\n    y" in text and 'href="https://example.org/y"' in html, (html, text)
    # A block that is still open while it streams.
    assert "<pre" in rendered("```\nopen")[0]
    # Formulas are MathML, prices are prices, and each block has its own direction.
    page.evaluate(
        """async () => {
            const { render } = await import("/console/markdown.js");
            // What makes formulas is loaded when one is there.
            while (!render("$x$")[0].innerHTML.includes("<math")) await new Promise((resolve) => setTimeout(resolve, 20));
        }"""
    )
    html, text = rendered("It costs $5 or $10, and $e^{i\\pi}$ or \\(\\frac{1}{2}\\).\n\n$$\n\\sum_{i=1}^n i\n$$\n\nمرحبا")
    assert html.count("<math") == 3 and "$5 or $10" in text and "<mfrac" in html, html
    assert html.count('dir="auto"') >= 2, html
    assert "style=" not in rendered("$\\frac{1}{2}$ and | a |")[0].replace("math-style", "")
    # Text cannot become markup at all: the page's policy forbids it.
    assert page.evaluate(
        """() => {
            try {
                document.createElement("div").innerHTML = "<b>x</b>";
            } catch (error) {
                return error.name;
            }
        }"""
    ) == "TypeError"


# What repeats a short piece: most ways to make a reader of Markdown slow are of that kind.
PIECES = [
    " *a", " _a_b", "*_", "**a ", "***a* ", "~~a", "[a](", "[", "![", "[a][", "[a]: b\n", "`a ", "``a `", "$a ", "$$a", "\\(a ", "\\[a\n",
    "> ", "> > a\n", ">- a\n", "- a\n", "  - a\n    ", "1. a\n", "* * ", "| a ", "a\n|-\n", "| a | b |\n|---|---|\n", "```\n", "~~~a\n```\n",
    "<a ", "<a@b.c>", "&amp", "http://", "https://a.b/(", "# a\n", "a\n===\n", "\\", "\u202e*a", "مرحبا *a",
]


def markdown_takes_linear_time(page):
    # Four times the text takes about four times as long, where a square would take sixteen; pieces at random as well.
    # Nothing is judged by the clock of a busy machine alone: a slow one is measured again, and the shortest counts.
    slow = page.evaluate(
        """async (pieces) => {
            const { render } = await import("/console/markdown.js");
            const time = (text) => {
                const began = performance.now();
                render(text);
                return performance.now() - began;
            };
            let state = 12345;
            const random = (most) => (state = (state * 1103515245 + 12345) % 2147483648) % most;
            const repeated = [...pieces];
            for (let round = 0; round < 20; round += 1) {
                repeated.push(Array.from({ length: 2 + random(4) }, () => pieces[random(pieces.length)]).join(""));
            }
            const slow = [];
            for (const piece of repeated) {
                const [small, large] = [8000, 32000].map((length) => piece.repeat(Math.ceil(length / piece.length)).slice(0, length));
                let [least, most] = [Infinity, Infinity];
                for (let again = 0; again < 10; again += 1) {
                    least = Math.min(least, time(small));
                    most = Math.min(most, time(large));
                    // What takes less is noise.
                    if (most < 100 || most < least * 12) break;
                }
                if (most >= 100 && most >= least * 12) slow.push([piece, least, most]);
                await new Promise((resolve) => setTimeout(resolve));
            }
            return slow;
        }""",
        PIECES,
    )
    assert not slow, slow


def tokens_show_how_likely_they_were(page):
    page.click("#new")
    parameters(page)
    page.check("#probabilities")
    parameters(page, False)
    ask(page, "What is the capital of France?")
    tool(page, "Probabilities")
    tokens = page.locator(".tokens .token")
    assert tokens.count() > 3
    expect(page.locator(".tokens-legend")).to_contain_text("80 % or more")
    # By keyboard: the list has the focus, arrows move.
    expect(page.locator(".tokens")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_have_attribute("aria-selected", "true")
    rows = page.locator(".candidates tbody tr")
    expect(rows).to_have_count(5)
    # By pointer. Probabilities fall, and together are no more than everything.
    tokens.nth(2).hover()
    expect(tokens.nth(2)).to_have_attribute("aria-selected", "true")
    shares = [float(re.sub(r"[^0-9.]", "", text)) for text in page.locator(".candidates td.number").all_inner_texts()]
    assert shares == sorted(shares, reverse=True) and sum(shares) <= 100.6, shares
    accessible(page, "probabilities")
    parameters(page)
    page.uncheck("#probabilities")
    parameters(page, False)


def thoughts_are_folded_and_calls_take_results(page):
    # The model of these tests neither thinks nor calls: what another one would say, cut where it hurts.
    def call(index, **part):
        return {"tool_calls": [{"index": index, **part}]}

    first = events(
        {"role": "assistant", "reasoning_content": "They want "},
        {"reasoning_content": f"the weather {MARKUP}"},
        {"content": "I will look."},
        call(0, id="call-a", type="function", function={"name": "weather", "arguments": ""}),
        call(0, function={"arguments": '{"city": "Pa'}),
        call(0, function={"arguments": 'ris"}'}),
        call(1, id="call-b", type="function", function={"name": "weather", "arguments": '{"city": "Rome"}'}),
    )
    page.click("#new")
    parameters(page)
    page.check("#offers")
    page.fill("#offered", "[")
    page.fill("#question", "Where is it warmer?")
    page.click("#send")
    expect(page.locator("#offered-error")).to_contain_text("The tools are no JSON")
    expect(page.locator("#ask-error")).to_contain_text("The tools are no JSON")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    page.fill("#offered", json.dumps(tools))
    parameters(page, False)
    with Scripted(page, first, events({"content": "Warm in both."})) as scripted:
        ask(page, "Where is it warmer?")
        assert scripted.asked[0]["tools"] == tools, scripted.asked
        expect(answers(page)).to_have_text("I will look.")
        thoughts = page.locator(".thoughts")
        expect(thoughts.locator("div")).to_be_hidden()
        thoughts.locator("summary").click()
        expect(thoughts.locator("div")).to_have_text(f"They want the weather {MARKUP}")
        expect(page.locator(".calls p")).to_have_text(["Calls weather", "Calls weather"])
        shown = [json.loads(text) for text in page.locator(".calls pre").all_inner_texts()]
        assert shown == [{"city": "Paris"}, {"city": "Rome"}], shown
        accessible(page, "calls")
        fields = page.get_by_label("Result of weather")
        fields.nth(0).fill("20 degrees")
        fields.nth(1).fill("25 degrees")
        page.get_by_role("button", name="Send results").click()
        expect(answers(page)).to_have_text(["I will look.", "Warm in both."])
        # Calls go back whole, each with its result, and thoughts do not.
        made = [
            {"id": name, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
            for name, city in [("call-a", "Paris"), ("call-b", "Rome")]
        ]
        assert scripted.asked[1]["messages"] == [
            {"role": "user", "content": "Where is it warmer?"},
            {"role": "assistant", "content": "I will look.", "tool_calls": made},
            {"role": "tool", "tool_call_id": "call-a", "content": "20 degrees"},
            {"role": "tool", "tool_call_id": "call-b", "content": "25 degrees"},
        ], scripted.asked[1]
    parameters(page)
    page.uncheck("#offers")
    parameters(page, False)
    page.click("#new")
    assert page.title() == "Fornax"


def an_answer_is_read_while_it_comes(page):
    pieces = [{"reasoning_content": f"thought {number} "} for number in range(40)]
    pieces += [{"content": part} for part in ["First *para", "graph*.\n\n", "```py\nx = ", "1\n```\n\n"]]
    pieces += [{"content": f"word{number} "} for number in range(120)]
    page.evaluate(SLOWLY, [pieces, 25])
    page.fill("#question", "Slowly, please.")
    page.keyboard.press("Enter")
    summary = page.locator(".thoughts summary")
    expect(summary).to_have_text("Thinking")
    # A press of 120 ms, through which it was drawn anew before.
    summary.hover()
    page.mouse.down()
    page.wait_for_timeout(120)
    page.mouse.up()
    expect(page.locator(".thoughts div")).to_be_visible()
    expect(page.locator(".thoughts div")).to_contain_text("thought 3")
    # What is selected stays selected, in a block that is whole and in the one that grows.
    expect(answers(page)).to_contain_text("word5")
    held = page.evaluate(
        """() => {
            const [first, , last] = document.querySelector(".message.assistant .text").children;
            window.first = first;
            const range = document.createRange();
            range.setStart(first.firstChild, 0);
            range.setEnd(last.firstChild, 5);
            getSelection().removeAllRanges();
            getSelection().addRange(range);
            return [getSelection().toString(), window.slow.isDone];
        }"""
    )
    assert not held[1] and held[0].startswith("First paragraph"), held
    expect(answers(page)).to_contain_text("word60")
    kept, same, done = page.evaluate(
        "[getSelection().toString(), window.first === document.querySelector('.message.assistant .text').firstChild, window.slow.isDone]"
    )
    assert kept == held[0] and same and not done, (kept, held, same, done)
    answered(page)
    assert page.evaluate("getSelection().toString()") == held[0]
    expect(page.locator(".thoughts summary")).to_have_text("Thoughts")
    # The code has its colours now.
    expect(page.locator(".code .c-number")).to_have_text("1")
    # What is copied is what the model wrote.
    tool(page, "Copy the answer as it was written")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "".join(piece.get("content", "") for piece in pieces), copied
    page.get_by_role("button", name="Copy this code in py").click()
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"


def a_broken_answer_is_kept_and_the_server_is_waited_for(page):
    page.click("#new")
    # Half an answer, then nothing more.
    half = events({"content": "Half of"}).replace("data: [DONE]\n\n", "")
    with Scripted(page, half):
        page.fill("#question", "Whole?")
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant .error")).to_have_text("The answer was broken off. What arrived is kept.")
    expect(answers(page)).to_have_text("Half of")
    with Scripted(page, events({"content": " an answer."})) as scripted:
        page.get_by_role("button", name="Continue", exact=True).click()
        answered(page)
        expect(answers(page)).to_have_text("Half of an answer.")
        assert scripted.asked[0]["continue_final_message"] is True, scripted.asked
    # The server goes away: said at once and at the place, and once it is back that is seen without a reload.
    page.route("**/*", lambda route: route.abort("connectionrefused"))
    page.fill("#question", "Are you there?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .error").last).to_have_text("The server does not answer.")
    expect(page.locator("#gone")).to_have_text("The server does not answer. Trying again…")
    accessible(page, "gone")
    page.unroute("**/*")
    expect(page.locator("#gone")).to_be_hidden()
    page.get_by_role("button", name="Try again").click()
    answered(page)
    expect(answers(page)).to_have_count(2)


def the_cache_says_why_it_had_no_more(page):
    page.click("#new")
    usage = {"prompt_tokens": 900, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 64, "cache_miss": {"reason": "evicted", "tokens": 512}}}
    with Scripted(page, events({"content": "Yes."}, usage=usage)):
        ask(page, "Again?")
    expect(page.locator(".figures")).to_contain_text("cache: 512 tokens were known, but their pages were needed for others")
    # 920 of 1024: it is said that there is little room left.
    expect(page.locator("#context")).to_have_class(re.compile("full"))


def conversations_are_kept_named_searched_exported_and_imported(page):
    with Scripted(page, events({"content": "A **zebra** is striped."})):
        page.click("#new")
        ask(page, "Tell me about zebras.")
    opened = page.locator("#conversations [aria-current=true]")
    expect(opened).to_have_text("Tell me about zebras.")
    many = page.locator("#conversations .open").count()
    assert many >= 6, many
    page.locator("#conversations li.chosen").hover()
    page.get_by_role("button", name="Rename Tell me about zebras.").click()
    page.get_by_label("Name of the conversation").fill("Striped horses")
    page.keyboard.press("Enter")
    expect(opened).to_have_text("Striped horses")
    expect(page.locator("#chat-name")).to_have_text("Striped horses")
    # Found by a word of an answer.
    page.fill("#search", "striped zebra")
    expect(page.locator("#conversations .open")).to_have_text(["Striped horses"])
    with page.expect_download() as caught:
        page.locator("#conversations li.chosen").hover()
        page.get_by_role("button", name="Export Striped horses").click()
    exported = json.loads(Path(caught.value.path()).read_text())
    assert [message["content"] for message in exported["messages"]] == ["Tell me about zebras.", "A **zebra** is striped."], exported
    page.locator("#conversations li.chosen").hover()
    page.get_by_role("button", name="Delete Striped horses").click()
    expect(page.locator("#conversations .open")).to_have_count(0)
    expect(page.locator("#no-conversations")).to_have_text("Nothing was found.")
    page.set_input_files("#import-file", caught.value.path())
    expect(page.locator("#conversations .open")).to_have_text(["Striped horses"])
    page.locator("#conversations .open").click()
    expect(answers(page)).to_have_text("A zebra is striped.")
    # Also what the terminal's /save writes; what is no conversation is refused with a reason.
    saved = folder / "saved.json"
    saved.write_text(json.dumps({"model": "smollm2", "messages": [{"role": "user", "content": "Ping?"}, {"role": "assistant", "content": f"Pong {MARKUP}"}]}))
    page.fill("#search", "")
    page.set_input_files("#import-file", saved)
    page.locator("#conversations").get_by_role("button", name="Ping?", exact=True).click()
    expect(answers(page)).to_have_text(f"Pong {MARKUP}")
    saved.write_text("{}")
    page.set_input_files("#import-file", saved)
    expect(page.locator("#ask-error")).to_contain_text("no conversation is in this file")
    expect(page.locator("#conversations .open")).to_have_count(many + 1)
    # Deleted while it is answered, it does not come back.
    page.click("#new")
    page.evaluate(SLOWLY, [[{"content": f"word{number} "} for number in range(400)], 10])
    page.fill("#question", "Forget this.")
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("word3")
    expect(opened).to_have_text("Forget this.")
    page.locator("#conversations li.chosen").hover()
    page.get_by_role("button", name="Delete Forget this.").click()
    expect(page.locator("#conversations .open")).to_have_count(many + 1)
    expect(page.locator("#empty")).to_be_visible()
    page.get_by_role("button", name="Ping?", exact=True).click()
    expect(answers(page)).to_have_text(f"Pong {MARKUP}")
    # They outlive the page, and another tab sees them.
    reload(page)
    expect(page.locator("#conversations .open")).to_have_count(many + 1)
    expect(answers(page)).to_have_text(f"Pong {MARKUP}")
    assert page.title() == "Fornax"


def parameters_and_presets_are_kept(page):
    parameters(page)
    page.fill("#system", "You are a pirate.")
    page.fill("#stops", "END\nSTOP")
    page.fill("#top_k", "5")
    page.click("#save-preset")
    page.fill("#preset-name", "Pirate")
    page.keyboard.press("Enter")
    expect(page.locator("#preset")).to_have_value("Pirate")
    page.click("#reset")
    expect(page.locator("#system")).to_have_value("")
    reload(page)
    parameters(page)
    expect(page.locator("#top_k")).to_have_value("")
    page.select_option("#preset", "Pirate")
    expect(page.locator("#system")).to_have_value("You are a pirate.")
    expect(page.locator("#modes")).to_contain_text("system message")
    reload(page)
    with Scripted(page, events({"content": "Arr."})) as scripted:
        page.click("#new")
        ask(page, "Hello?")
    asked = scripted.asked[0]
    assert asked["messages"][0] == {"role": "system", "content": "You are a pirate."}, asked
    assert (asked["stop"], asked["top_k"]) == (["END", "STOP"], 5), asked
    # A number that cannot be is said, and nothing is sent.
    parameters(page)
    page.fill("#top_p", "7")
    page.fill("#question", "Hello again?")
    page.focus("#question")
    page.keyboard.press("Enter")
    expect(page.locator("#ask-error")).to_contain_text("Top p")
    expect(page.locator("#question")).to_have_value("Hello again?")
    page.click("#delete-preset") if page.locator("#preset").input_value() else None
    page.click("#reset")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "40")
    page.fill("#question", "")
    parameters(page, False)


def text_files_go_along(page):
    page.click("#new")
    notes, picture = folder / "notes.txt", folder / "broken.bin"
    notes.write_text("The code word is ```heron```.\n")
    picture.write_bytes(bytes(range(256)))
    page.set_input_files("#attach-files", [notes, picture])
    expect(page.locator("#attached li")).to_have_count(1)
    expect(page.locator("#ask-error")).to_contain_text("broken.bin: is no text in UTF-8")
    with Scripted(page, events({"content": "Heron."})) as scripted:
        ask(page, "What is the code word?")
    assert scripted.asked[0]["messages"] == [
        {"role": "user", "content": "File notes.txt:\n````\nThe code word is ```heron```.\n````\n\nWhat is the code word?"}
    ], scripted.asked
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator(".message.user .file summary")).to_contain_text("notes.txt")
    expect(page.locator(".message.user .text")).to_have_text("What is the code word?")


# A red square and a blue one, of one pixel each.
RED = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQD3A0FDAAAAAElFTkSuQmCC"
BLUE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mNgYPgPAAEDAQA2dBFAAAAAAElFTkSuQmCC"

# Hands a file to the page as a browser does when it is pasted or dropped.
HANDS_OVER = """([event, target, data, name]) => {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name, { type: "image/png" }));
    const init = { bubbles: true, cancelable: true };
    const made = event === "paste" ? new ClipboardEvent(event, { ...init, clipboardData: transfer }) : new DragEvent(event, { ...init, dataTransfer: transfer });
    document.querySelector(target).dispatchEvent(made);
}"""


def images_are_picked_pasted_and_dropped(page):
    page.click("#new")
    picked, drawing = folder / "picked.png", folder / "drawing.svg"
    picked.write_bytes(base64.b64decode(RED))
    drawing.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    page.set_input_files("#attach-files", [picked, drawing])
    expect(page.locator("#attached li")).to_have_count(1)
    expect(page.locator("#ask-error")).to_contain_text("drawing.svg: is no JPEG, PNG, WebP or GIF")
    page.evaluate(HANDS_OVER, ["paste", "#question", BLUE, "pasted.png"])
    expect(page.locator("#attached li")).to_have_count(2)
    page.evaluate(HANDS_OVER, ["drop", "#chat", RED, "dropped.png"])
    expect(page.locator("#attached li img.thumbnail")).to_have_count(3)
    accessible(page, "images")
    page.get_by_role("button", name="Take dropped.png away").click()
    expect(page.locator("#attached li")).to_have_count(2)
    with Scripted(page, events({"content": "Red and blue."})) as scripted:
        ask(page, "Which colours?")
    url = "data:image/png;base64,"
    shown = [{"type": "image_url", "image_url": {"url": url + data}} for data in (RED, BLUE)]
    assert scripted.asked[0]["messages"] == [
        {"role": "user", "content": [*shown, {"type": "text", "text": "Which colours?"}]}
    ], scripted.asked
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator(".message.user img.thumbnail")).to_have_count(2)
    # They are there after a reload, and go along with what is asked next.
    reload(page)
    expect(page.locator(".message.user img.thumbnail")).to_have_count(2)
    with Scripted(page, events({"content": "Two."})) as scripted:
        ask(page, "How many?")
    assert [len(message["content"]) for message in scripted.asked[0]["messages"][:1]] == [3], scripted.asked
    # Answers of a model that reads text say so.
    page.click("#new")
    page.set_input_files("#attach-files", [picked])
    page.fill("#question", "And this?")
    page.keyboard.press("Enter")
    answered(page, "The answer failed")
    expect(page.locator(".message.assistant")).to_contain_text("reads no images")
    # A photograph of a phone is sent smaller.
    size = page.evaluate("""async () => {
        const { read } = await import("/console/attachment.js");
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [3000, 1500];
        const context = canvas.getContext("2d");
        const noise = context.createImageData(3000, 1500);
        let state = 1;
        for (let at = 0; at < noise.data.length; at += 1) noise.data[at] = (state = (state * 48271) % 2147483647) % 256;
        context.putImageData(noise, 0, 0);
        const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
        const { image } = await read(new File([blob], "large.png", { type: "image/png" }));
        return [image.slice(0, 22), blob.size > 1_000_000, image.length < blob.size];
    }""")
    assert size == ["data:image/jpeg;base64", True, True], size


def keys_do_what_their_list_says(page):
    page.keyboard.press("Control+/")
    expect(page.locator("#keys-dialog")).to_be_visible()
    accessible_dialog = Axe().run(page).response["violations"]
    assert not [one["id"] for one in accessible_dialog if one["impact"] in ("serious", "critical")], accessible_dialog
    page.keyboard.press("Escape")
    expect(page.locator("#keys-dialog")).to_be_hidden()
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("Shift+Escape")
    expect(page.locator("#question")).to_be_focused()
    # Up in an empty field edits the last question; Escape lets it be.
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edited message")).to_have_value("What is the code word?")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Edited message")).to_have_count(0)
    page.keyboard.press("Control+Shift+L")
    expect(page.locator("#said")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "Heron."
    page.keyboard.press("Control+b")
    expect(page.locator("#side")).to_be_hidden()
    page.keyboard.press("Control+b")
    expect(page.locator("#side")).to_be_visible()
    page.keyboard.press("Control+,")
    expect(page.locator("#parameters")).to_be_visible()
    page.keyboard.press("Control+,")
    expect(page.locator("#parameters")).to_be_hidden()
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#empty")).to_be_visible()


def models_are_loaded_unloaded_and_fetched(page):
    lines = [
        {"status": "pulling manifest"},
        {"status": "pulling weights", "completed": 1 << 20, "total": 4 << 20},
        {"error": "no such model"},
    ]

    def with_pull(route):
        document = route.fetch().json()
        document["paths"]["/api/pull"] = {"post": {}}
        route.fulfill(json=document)

    # The button to fetch is there where the server has the route.
    page.route("**/openapi.json", with_pull)
    page.route("**/api/pull", lambda route: route.fulfill(body="\n".join(map(json.dumps, lines))))
    page.click("#show-models")
    rows = page.locator("#models-list tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("134.5")
    expect(rows.nth(1)).to_contain_text("unloaded")
    page.get_by_role("button", name="Load second").click()
    expect(rows.nth(1).locator("td").nth(3)).to_have_text("loaded")
    page.fill("#pull-name", "qwen3:0.6b")
    page.keyboard.press("Enter")
    expect(page.locator("#models-error")).to_have_text("no such model")
    page.screenshot(path=folder / "models.png")
    found = Axe().run(page).response["violations"]
    assert not [one["id"] for one in found if one["impact"] in ("serious", "critical")], found
    page.get_by_role("button", name="Unload second").click()
    expect(rows.nth(1).locator("td").nth(3)).to_have_text("unloaded")
    page.click("#hide-models")
    page.unroute("**/openapi.json")
    page.unroute("**/api/pull")
    # What is chosen is kept, and answers.
    page.select_option("#model", "second")
    reload(page)
    expect(page.locator("#model")).to_have_value("second")
    with Scripted(page, events({"content": "Here."})) as scripted:
        page.click("#new")
        ask(page, "Who are you?")
    assert scripted.asked[0]["model"] == "second", scripted.asked
    expect(page.locator(".message.assistant h3")).to_have_text("second")
    page.select_option("#model", "smollm2")


def it_can_be_installed(page):
    address = page.get_attribute("link[rel=manifest]", "href")
    with urllib.request.urlopen(f"{base}{address}") as response:
        manifest = json.load(response)
    assert (manifest["display"], manifest["start_url"]) == ("standalone", "/"), manifest
    for icon in manifest["icons"]:
        with urllib.request.urlopen(f"{base}{icon['src']}") as response:
            assert response.headers["content-type"] == icon["type"], icon
    assert page.evaluate("document.querySelector('.brand img').naturalWidth") > 0
    # The browser's own judgement.
    problems = page.context.new_cdp_session(page).send("Page.getInstallabilityErrors")["installabilityErrors"]
    # Incognito windows install nothing; nothing else may be wrong.
    assert [one["errorId"] for one in problems] in ([], ["in-incognito"]), problems


# The engine.


def the_engine_is_seen_under_load(page):
    body = {"prompt": "Once upon a time", "max_tokens": 700, "ignore_eos": True, "temperature": 0}
    ended = []

    def run():
        ended.append(call("/v1/completions", body))

    load = [threading.Thread(target=run) for _ in range(3)]
    for thread in load:
        thread.start()
    page.click("nav a[data-view=engine]")
    requests = page.locator("#requests tbody tr")
    # Two are computed and one waits.
    expect(requests).to_have_count(3)
    expect(page.locator("#requests tbody")).to_contain_text("running")
    expect(page.locator("#requests tbody")).to_contain_text("waiting")
    expect(page.locator("dd[data-fact=Running]")).to_have_text("2")
    expect(page.locator("dd[data-fact=Waiting]")).to_have_text("1")
    # Each with its speed.
    expect(requests.first.locator("td").last).to_have_text(re.compile(r"^(?!0\.0)\d+\.\d$"))
    expect(page.locator("dd[data-fact='Tokens/s']")).to_have_text(re.compile(r"^(?!0\.0)\d+\.\d$"))
    expect(page.locator("#pages-words")).to_contain_text(re.compile(r"^[1-9]\d* of \d+ pages"))
    label = page.locator("#pages canvas").get_attribute("aria-label")
    held, cached, free = (int(re.search(rf"(\d+) {word}", label)[1]) for word in ["held", "cached", "free"])
    live = call("/console/live")
    assert held > 0 and held + cached + free == live["kv"][0]["pages_total"], (label, live["kv"])
    # Pages in colours, not one.
    colours = page.evaluate(
        """() => {
            const canvas = document.querySelector("#pages canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const seen = new Set();
            for (let at = 0; at < data.length; at += 4) seen.add(data.slice(at, at + 3).join());
            return seen.size;
        }"""
    )
    assert colours >= 3, colours
    # Plan and allocator agree, purpose by purpose.
    for row in page.locator("#memory tbody tr").all():
        _, purpose, planned, allocated, _ = row.locator("td").all_inner_texts()
        assert planned == allocated or purpose == "scratch", (purpose, planned, allocated)
    assert page.locator("#memory tbody tr").count() >= 3
    expect(page.locator("#latency figcaption").first).to_contain_text("measured, half within")
    expect(page.locator("#errors tbody")).to_contain_text("SCHEMA_UNSUPPORTED")
    expect(page.locator("#errors tbody")).to_contain_text("cannot be followed exactly")
    accessible(page, "engine")
    for thread in load:
        thread.join()
    assert len(ended) == 3
    expect(page.locator("#requests-words")).to_have_text("Nobody asks for anything.")
    expect(page.locator("#pages-words")).to_contain_text(re.compile(r"^0 of "))


def the_busiest_model_is_followed(page):
    chooser = page.locator("#watched-model")
    expect(chooser.locator("option")).to_have_text(["the busiest", "smollm2 (loaded)", "second (unloaded)"])
    expect(page.locator("#status")).to_have_text("ready: smollm2")
    # Looking at one that is not loaded does not load it.
    chooser.select_option("second")
    expect(page.locator("#pages-words")).to_have_text("No model is loaded.")
    assert [one["state"] for one in call("/v1/models")["data"]] == ["loaded", "unloaded"]
    chooser.select_option("")
    expect(page.locator("dd[data-fact=Model]")).to_have_text("smollm2")
    ended = []
    # Long enough to be seen whole on a fast machine.
    body = {"model": "second", "prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True}
    load = threading.Thread(target=lambda: ended.append(call("/v1/completions", body)))
    load.start()
    # Nobody has to say where the work is.
    expect(page.locator("dd[data-fact=Model]")).to_have_text("second")
    expect(page.locator("#totals")).to_have_text("All models together: 1 running, 0 waiting.")
    expect(page.locator("#requests tbody tr")).to_have_count(1)
    expect(page.locator("#status")).to_have_text("ready: second")
    load.join()
    assert len(ended) == 1
    # It stays in sight when it is done. Its own latencies: one answer, where the first model has many.
    expect(page.locator("#requests-words")).to_have_text("Nobody asks for anything.")
    expect(page.locator("dd[data-fact=Model]")).to_have_text("second")
    expect(page.locator("#latency figcaption").nth(2)).to_contain_text("Whole answers: 1 measured")
    accessible(page, "models")
    chooser.select_option("smollm2")
    expect(page.locator("#status")).to_have_text("ready: smollm2")


def loading_and_failing_are_seen(page):
    states = [
        {"status": "loading", "version": "1", "uptime": 1.0, "loading": {"stage": "weights", "bytes": 1 << 20, "bytes_total": 4 << 20}},
        {
            "status": "failed", "version": "1", "uptime": 1.0, "error": "DEVICE_LOST: it is gone",
            "models": [{"id": "second", "state": "failed", "running": 0, "waiting": 0, "error": "MODEL_CORRUPT: no such file"}],
        },
    ]
    page.route(re.compile(r"/console/live(\?|$)"), lambda route: route.fulfill(json=states[0]))
    expect(page.locator("#loading-stage")).to_have_text("weights, 1.0 MiB of 4.0 MiB")
    assert page.evaluate("document.getElementById('loading-bar').value") == 1 << 20
    states.pop(0)
    # What failed, and of which model.
    expect(page.locator("#engine-error")).to_have_text("DEVICE_LOST: it is gone second: MODEL_CORRUPT: no such file")
    page.unroute(re.compile(r"/console/live(\?|$)"))
    expect(page.locator("#status")).to_have_text("ready: smollm2")


def the_theme_is_the_systems_or_chosen(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.select_option("#theme", "light")
    assert page.evaluate(ground) == light
    reload(page)
    assert page.evaluate(ground) == light, "the choice is remembered"
    page.select_option("#theme", "")
    assert page.evaluate(ground) == dark
    page.emulate_media(color_scheme="light")


def a_phone_has_room_for_all_of_it(page):
    page.set_viewport_size({"width": 360, "height": 740})
    for view in ["engine", "chat"]:
        page.click(f"nav a[data-view={view}]")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view}: a phone scrolls sideways"
    expect(page.locator("#send")).to_be_in_viewport()
    expect(page.locator("#side")).to_be_hidden()
    page.screenshot(path=folder / "phone.png")
    page.click("#show-side")
    page.locator("#conversations .open").first.click()
    expect(page.locator("#side")).to_be_hidden()
    expect(page.locator(".message").first).to_be_visible()
    page.click("#show-settings")
    expect(page.locator("#parameters")).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(page.locator("#parameters")).to_be_hidden()
    page.set_viewport_size({"width": 1280, "height": 900})


def everything_is_reached_by_keyboard(page):
    reload(page)
    page.click("#new")
    page.evaluate("document.activeElement.blur()")
    parameters(page)
    page.evaluate("document.activeElement.blur()")
    wanted = {
        "Skip to content", "Chat", "Engine", "Jobs", "Files", "theme", "new", "search", "import", "question", "attach", "model", "send",
        "temperature", "probabilities", "save-preset",
    }
    # Each conversation in the list has a few stops of its own.
    for _ in range(250):
        if not wanted:
            break
        page.keyboard.press("Tab")
        wanted.discard(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        # The frame around the question shows that it has the focus.
        seen = page.evaluate(
            """() => {
                const node = document.activeElement;
                if (node === document.body) return true;
                if (node.id === "question") return getComputedStyle(node.form).borderTopColor === getComputedStyle(document.querySelector("#send")).backgroundColor;
                return getComputedStyle(node).outlineStyle !== "none";
            }"""
        )
        assert seen, page.evaluate("document.activeElement.outerHTML")
    assert not wanted, wanted
    parameters(page, False)


# The jobs.


def the_jobs_page_asks_for_a_key(page):
    page.evaluate("sessionStorage.clear()")
    page.goto(f"{base}/console/jobs")
    expect(page.locator("#access")).to_be_visible()
    expect(page.locator("#counts")).to_be_empty()
    expect(page.locator("#jobs tr")).to_have_count(0)
    page.fill("#key", key)
    page.keyboard.press("Enter")
    expect(page.locator("#access")).to_be_hidden()
    expect(page.locator("#counts")).to_contain_text("0 wait")


def shows_a_job_that_comes_while_it_is_open(page):
    done = call("/v2/default/runsync", {"input": {"prompt": "An apple is a", "schema": SCHEMA, "temperature": 0}})
    assert done["status"] == "COMPLETED", done
    line = page.locator(f"tr[data-id='{done['id']}']")
    expect(line).to_contain_text("COMPLETED")
    line.click()
    expect(page.locator("#one")).to_be_visible()
    expect(page.locator("#id")).to_have_text(done["id"])
    expect(page.locator("#events tr td:nth-child(2)")).to_have_text(["submitted", "started", "completed"])
    assert json.loads(page.locator("#result").inner_text()) == done["output"]


def shows_a_failure_and_what_it_says(page):
    text = {"type": "object", "properties": {"text": {"type": "string", "minLength": 50}}, "required": ["text"]}
    failed = call("/v2/default/runsync", {"input": {"prompt": "A story:", "schema": text, "max_tokens": 10}})
    assert failed["output"]["code"] == "OUTPUT_TRUNCATED", failed
    line = page.locator(f"tr[data-id='{failed['id']}']")
    expect(line).to_contain_text("FAILED")
    # By keyboard alone.
    line.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#events tr td:nth-child(4)").last).to_have_text("OUTPUT_TRUNCATED")
    expect(page.locator("#result")).to_contain_text("OUTPUT_TRUNCATED")
    accessible(page, "jobs")


def shows_the_states_that_are_asked_for(page):
    page.select_option("#state", "FAILED")
    expect(page.locator("#jobs tr")).to_have_count(1)
    page.select_option("#state", "")
    expect(page.locator("#jobs tr")).to_have_count(2)


def shows_results_as_text(page):
    chosen = {"input": {"prompt": "Say it.", "guided_choice": [MARKUP], "temperature": 0}}
    done = call("/v2/default/runsync", chosen)
    assert done["output"]["output"] == MARKUP, done
    page.locator(f"tr[data-id='{done['id']}']").click()
    expect(page.locator("#result")).to_contain_text("onerror")
    assert page.title() == "Fornax: jobs"


def jobs_are_submitted_here(page):
    page.click("#submitting summary")
    page.select_option("#kind", "batch")
    page.fill("#job-prefix", "Fruit or metal?")
    page.fill("#job-items", "An apple.\nIron.\n\nA pear.")
    page.fill("#job-schema", "{")
    submit = page.locator("#submit").get_by_role("button", name="Submit")
    submit.click()
    expect(page.locator("#submit-error")).to_contain_text("The schema is no JSON")
    page.fill("#job-schema", json.dumps(SCHEMA))
    submit.click()
    expect(page.locator("#items-words")).to_have_text("3 of 3 items are done")
    expect(page.locator("#jobs tr[data-chosen]")).to_contain_text("COMPLETED")
    results = json.loads(page.locator("#result").inner_text())["output"]
    assert [one["id"] for one in results] == ["1", "2", "3"], results
    expect(page.locator("#cancel")).to_be_disabled()
    # What the server refuses is said where it was asked for.
    page.select_option("#kind", "json")
    page.fill("#job-input", '{"prompt": "a", "colour": 1}')
    submit.click()
    expect(page.locator("#submit-error")).to_contain_text("colour")


def jobs_are_cancelled_and_tried_again(page):
    long = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    page.fill("#job-input", json.dumps(long))
    page.locator("#submit").get_by_role("button", name="Submit").click()
    expect(page.locator("#jobs tr[data-chosen]")).to_contain_text(re.compile("IN_QUEUE|IN_PROGRESS"))
    page.click("#cancel")
    expect(page.locator("#jobs tr[data-chosen]")).to_contain_text("CANCELLED")
    expect(page.locator("#retry")).to_be_disabled()
    page.click("#submitting summary")
    page.select_option("#state", "FAILED")
    page.locator("#jobs tr").first.click()
    expect(page.locator("#events tr td:nth-child(2)").last).to_have_text("failed")
    page.click("#retry")
    # It is tried again, and fails again: its text is still too short for its schema.
    expect(page.locator("#events")).to_contain_text(re.compile("retr"))
    expect(page.locator("#jobs tr[data-chosen]")).to_contain_text("FAILED")
    page.select_option("#state", "")


def files_become_batches(page):
    page.click("nav a[data-view=files]")
    expect(page.locator("#no-files")).to_be_visible()
    requests = folder / "requests.jsonl"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    requests.write_text("\n".join(json.dumps({**line, "custom_id": name}) for name in ["a", "b"]))
    page.set_input_files("#file", requests)
    page.get_by_role("button", name="Send it").click()
    expect(page.locator("#files tr")).to_contain_text("requests.jsonl")
    page.click("#start")
    row = page.locator("#batches tr")
    expect(row).to_contain_text("completed")
    expect(row).to_contain_text("2 of 2 answered")
    with page.expect_download() as caught:
        page.get_by_role("button", name=re.compile("^Answers of")).click()
    answers_of = [json.loads(line) for line in Path(caught.value.path()).read_text().splitlines()]
    assert [one["custom_id"] for one in answers_of] == ["a", "b"], answers_of
    # A file with a wrong line is a batch that says which.
    requests.write_text("{}\n")
    page.set_input_files("#file", requests)
    page.get_by_role("button", name="Send it").click()
    expect(page.locator("#files tr")).to_have_count(3)
    page.click("#start")
    expect(page.locator("#batches .error").first).to_contain_text("line 1")
    accessible(page, "files")
    page.get_by_role("button", name="Delete requests.jsonl").first.click()
    expect(page.locator("#files tr")).to_have_count(2)


with sync_playwright() as playwright:
    # Containers run as root, where Chromium's own sandbox does not start.
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.set_default_timeout(PATIENCE)
    complaints, asked = [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    # What the browser's own policy refuses is said on its console.
    page.on("console", lambda said: "Content Security Policy" in said.text and complaints.append(said.text))
    page.on("request", lambda request: asked.append(request.url))
    for scenario in [
        the_page_asks_for_a_key,
        a_question_is_answered_as_it_is_made,
        answers_and_questions_have_versions,
        an_answer_is_stopped_gone_on_with_and_deleted,
        an_answer_has_the_form_of_a_schema,
        markdown_becomes_nodes_and_never_markup,
        markdown_takes_linear_time,
        tokens_show_how_likely_they_were,
        thoughts_are_folded_and_calls_take_results,
        an_answer_is_read_while_it_comes,
        a_broken_answer_is_kept_and_the_server_is_waited_for,
        the_cache_says_why_it_had_no_more,
        conversations_are_kept_named_searched_exported_and_imported,
        parameters_and_presets_are_kept,
        images_are_picked_pasted_and_dropped,
        text_files_go_along,
        keys_do_what_their_list_says,
        models_are_loaded_unloaded_and_fetched,
        it_can_be_installed,
        the_engine_is_seen_under_load,
        the_busiest_model_is_followed,
        loading_and_failing_are_seen,
        the_theme_is_the_systems_or_chosen,
        a_phone_has_room_for_all_of_it,
        everything_is_reached_by_keyboard,
        the_jobs_page_asks_for_a_key,
        shows_a_job_that_comes_while_it_is_open,
        shows_a_failure_and_what_it_says,
        shows_the_states_that_are_asked_for,
        shows_results_as_text,
        jobs_are_submitted_here,
        jobs_are_cancelled_and_tried_again,
        files_become_batches,
    ]:
        scenario(page)
        print("ok", scenario.__name__, flush=True)
    assert not complaints, complaints
    elsewhere = [url for url in asked if not url.startswith((f"{base}/", "data:", "blob:"))]
    assert not elsewhere, elsewhere
    browser.close()
