"""The console in a real browser: python console_suite.py BASE_URL KEY CHROMIUM FOLDER. Prints `ok NAME` for each scenario;
screenshots go into the folder."""

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
    expect(page.locator("#progress")).to_have_text("The answer is complete")


def answers(page):
    return page.locator(".message.assistant .text")


def accessible(page, name):
    """No serious or critical finding of axe-core, in either theme; a screenshot of each."""
    for theme in ["light", "dark"]:
        page.select_option("#theme", theme)
        page.screenshot(path=folder / f"{name}-{theme}.png")
        found = Axe().run(page).response["violations"]
        bad = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert not bad, (name, theme, bad)
    page.select_option("#theme", "")


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
    expect(page.locator("#status")).to_have_text("ready: smollm2")
    # In this tab, and nowhere that outlives it.
    assert page.evaluate("sessionStorage.getItem('key')") == key
    assert key not in page.evaluate("JSON.stringify(localStorage) + document.cookie")


def a_question_is_answered_as_it_is_made(page):
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "40")
    ask(page, "What is the capital of France?")
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("Paris")
    figures = page.locator(".message.assistant .figures")
    expect(figures).to_contain_text("tokens/s")
    # It is announced once it is whole.
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "false")
    # The second question finds the first in the cache.
    ask(page, "And of Italy?")
    expect(figures.last).to_contain_text(re.compile(r"[1-9]\d* of them cached"))
    accessible(page, "chat")


def an_answer_is_made_again_and_a_question_is_changed(page):
    page.fill("#temperature", "1")
    page.click("#regenerate")
    expect(page.locator("#progress")).to_have_text("The answer is complete")
    expect(page.locator(".message")).to_have_count(4)
    page.fill("#temperature", "0")
    page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("What is the capital of Japan?")
    page.get_by_role("button", name="Ask this instead").click()
    expect(page.locator(".message.user .text")).to_have_text(["What is the capital of Japan?"])
    expect(page.locator("#progress")).to_have_text("The answer is complete")
    expect(answers(page)).to_contain_text("Tokyo")


def an_answer_is_stopped(page):
    page.fill("#max_tokens", "")
    page.click("#clear")
    page.fill("#question", "Count from 1 to 1000, every number.")
    # Within the page, as soon as there is text: on a busy machine the answer may end before a click from here arrives.
    page.evaluate(
        """() => {
            const stop = document.querySelector("#stop");
            const whenText = (_, observer) => {
                if (!document.querySelector(".message.assistant .text")?.textContent || stop.disabled) return;
                observer.disconnect();
                stop.click();
            };
            const all = { subtree: true, childList: true, characterData: true, attributes: true };
            new MutationObserver(whenText).observe(document.body, all);
        }"""
    )
    page.click("#send")
    expect(page.locator("#progress")).to_have_text("Stopped")
    expect(answers(page)).not_to_be_empty()
    expect(page.locator(".message.assistant .figures")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_enabled()
    # The server has let go of it too.
    page.wait_for_function(
        """async (key) => {
            const response = await fetch("/health", { headers: { Authorization: `Bearer ${key}` } });
            return (await response.json()).running === 0;
        }""",
        arg=key,
    )
    page.fill("#max_tokens", "40")


def an_answer_has_the_form_of_a_schema(page):
    page.click("#clear")
    page.check("#structured")
    page.fill("#schema", "{")
    page.fill("#question", "Is an apple a fruit or a metal?")
    page.click("#send")
    expect(page.locator("#schema-error")).to_contain_text("no JSON")
    page.click("#clear")
    page.fill("#schema", json.dumps(SCHEMA))
    ask(page, "Is an apple a fruit or a metal?")
    assert json.loads(answers(page).inner_text())["kind"] in ["fruit", "metal"]
    # What the server refuses is said, with its code.
    page.fill("#schema", json.dumps({"type": "colour"}))
    page.fill("#question", "Which colour?")
    page.click("#send")
    expect(page.locator(".message.assistant .error")).to_contain_text("SCHEMA_UNSUPPORTED")
    page.screenshot(path=folder / "refused.png")
    # Markup stays text.
    page.click("#clear")
    page.fill("#schema", json.dumps({"enum": [MARKUP]}))
    ask(page, "Say it.")
    assert json.loads(answers(page).inner_text()) == MARKUP
    assert page.title() == "Fornax"
    page.uncheck("#structured")


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
    assert "<h4>Title</h4>" in html and "<strong>bold</strong>" in html and "<code>code</code>" in html, html
    assert "<em>word</em>" in html and "snake_case_name, 2 * 3 * 4." in html and html.count("<li>") == 2, html
    assert "<img" not in html and MARKUP in text, html
    html, _ = rendered("[a](javascript:alert(1)) [b](https://example.org/x) <script>alert(1)</script>")
    assert html.count("<a ") == 1 and 'href="https://example.org/x"' in html and "<script" not in html, html
    html, _ = rendered("```js\n<b>1</b>\n```\n| a | b |\n|---|---|\n| 1 | 2 |\n1. x\n2. y\n> q")
    assert "&lt;b&gt;1&lt;/b&gt;" in html and html.count("<td>") == 2 and "<ol" in html and "<blockquote>" in html, html
    # A block that is still open while it streams.
    assert "<pre" in rendered("```\nopen")[0]


def tokens_show_how_likely_they_were(page):
    page.click("#clear")
    page.check("#probabilities")
    ask(page, "What is the capital of France?")
    page.get_by_role("button", name="Probabilities").click()
    tokens = page.locator(".token")
    assert tokens.count() > 3
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
    page.uncheck("#probabilities")


def events(*deltas):
    """A stream of chat completions."""
    parts = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    lines = [json.dumps(part) for part in parts] + ["[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines)


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
    asked, said = [], [first, events({"content": "Warm in both."})]

    def respond(route):
        asked.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=said[len(asked) - 1])

    page.click("#clear")
    page.check("#offers")
    page.fill("#offered", "[")
    page.fill("#question", "Where is it warmer?")
    page.click("#send")
    expect(page.locator("#schema-error")).to_contain_text("The tools are no JSON")
    page.click("#clear")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    page.fill("#offered", json.dumps(tools))
    page.route("**/v1/chat/completions", respond)
    ask(page, "Where is it warmer?")
    assert asked[0]["tools"] == tools, asked
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
    assert asked[1]["messages"] == [
        {"role": "user", "content": "Where is it warmer?"},
        {"role": "assistant", "content": "I will look.", "tool_calls": made},
        {"role": "tool", "tool_call_id": "call-a", "content": "20 degrees"},
        {"role": "tool", "tool_call_id": "call-b", "content": "25 degrees"},
    ], asked[1]
    page.unroute("**/v1/chat/completions")
    page.uncheck("#offers")
    page.click("#clear")
    assert page.title() == "Fornax"


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
    accessible(page, "engine")
    for thread in load:
        thread.join()
    assert len(ended) == 3
    expect(page.locator("#requests-words")).to_have_text("Nobody asks for anything.")
    expect(page.locator("#pages-words")).to_contain_text(re.compile(r"^0 of "))


def each_model_is_looked_at(page):
    chooser = page.locator("#watched-model")
    expect(chooser).to_be_visible()
    expect(chooser.locator("option")).to_have_text(["the first that is loaded", "smollm2 (loaded)", "second (unloaded)"])
    chooser.select_option("second")
    expect(page.locator("#pages-words")).to_have_text("No model is loaded.")
    expect(page.locator("#status")).to_have_text("ready")
    # To look does not load.
    assert [one["state"] for one in call("/v1/models")["data"]] == ["loaded", "unloaded"]
    call("/v1/completions", {"model": "second", "prompt": "Once", "max_tokens": 2})
    expect(page.locator("#status")).to_have_text("ready: second")
    expect(page.locator("dd[data-fact=Model]")).to_have_text("second")
    expect(chooser.locator("option").last).to_have_text("second (loaded)")
    # Its own latencies: one answer, where the first model has many.
    expect(page.locator("#latency figcaption").nth(2)).to_contain_text("Whole answers: 1 measured")
    accessible(page, "models")
    chooser.select_option("")
    expect(page.locator("#status")).to_have_text("ready: smollm2")


def loading_and_failing_are_seen(page):
    states = [
        {"status": "loading", "version": "1", "uptime": 1.0, "loading": {"stage": "weights", "bytes": 1 << 20, "bytes_total": 4 << 20}},
        {"status": "failed", "version": "1", "uptime": 1.0, "error": "DEVICE_LOST: it is gone"},
    ]
    page.route("**/console/live", lambda route: route.fulfill(json=states[0]))
    expect(page.locator("#loading-stage")).to_have_text("weights, 1.0 MiB of 4.0 MiB")
    assert page.evaluate("document.getElementById('loading-bar').value") == 1 << 20
    states.pop(0)
    expect(page.locator("#engine-error")).to_have_text("DEVICE_LOST: it is gone")
    page.unroute("**/console/live")
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
    page.reload()
    assert page.evaluate(ground) == light, "the choice is remembered"
    page.select_option("#theme", "")
    assert page.evaluate(ground) == dark
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 360, "height": 740})
    page.click("nav a[data-view=chat]")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a phone scrolls sideways"
    page.screenshot(path=folder / "phone.png")
    page.set_viewport_size({"width": 1280, "height": 900})


def everything_is_reached_by_keyboard(page):
    page.reload()
    reached = []
    for _ in range(18):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", reached
    for wanted in ["Skip to content", "Chat", "Engine", "Jobs", "theme", "question", "send", "temperature", "probabilities"]:
        assert wanted in reached, (wanted, reached)


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


with sync_playwright() as playwright:
    # Containers run as root, where Chromium's own sandbox does not start.
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE)
    complaints, asked = [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    # What the browser's own policy refuses is said on its console.
    page.on("console", lambda said: "Content Security Policy" in said.text and complaints.append(said.text))
    page.on("request", lambda request: asked.append(request.url))
    for scenario in [
        the_page_asks_for_a_key,
        a_question_is_answered_as_it_is_made,
        an_answer_is_made_again_and_a_question_is_changed,
        an_answer_is_stopped,
        an_answer_has_the_form_of_a_schema,
        markdown_becomes_nodes_and_never_markup,
        tokens_show_how_likely_they_were,
        thoughts_are_folded_and_calls_take_results,
        the_engine_is_seen_under_load,
        each_model_is_looked_at,
        loading_and_failing_are_seen,
        the_theme_is_the_systems_or_chosen,
        everything_is_reached_by_keyboard,
        the_jobs_page_asks_for_a_key,
        shows_a_job_that_comes_while_it_is_open,
        shows_a_failure_and_what_it_says,
        shows_the_states_that_are_asked_for,
        shows_results_as_text,
    ]:
        scenario(page)
        print("ok", scenario.__name__, flush=True)
    assert not complaints, complaints
    elsewhere = [url for url in asked if not url.startswith((f"{base}/", "data:"))]
    assert not elsewhere, elsewhere
    browser.close()
