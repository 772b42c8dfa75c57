"""The jobs page in a real browser: python console_suite.py BASE_URL KEY CHROMIUM. Prints `ok NAME` for each scenario."""

import json
import sys
import urllib.request

from playwright.sync_api import expect, sync_playwright

base, key, chromium = sys.argv[1:4]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fruit", "metal"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
# A result that would be markup if it were ever shown as such.
MARKUP = "<img src=x onerror=document.title='broken'>"


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base}/v2/default/{path}", data, headers)) as response:
        return json.load(response)


def asks_for_a_key(page):
    expect(page.locator("#access")).to_be_visible()
    expect(page.locator("#counts")).to_contain_text("UNAUTHORIZED")
    expect(page.locator("#jobs tr")).to_have_count(0)
    page.fill("#key", key)
    page.keyboard.press("Enter")
    expect(page.locator("#access")).to_be_hidden()
    expect(page.locator("#counts")).to_contain_text("0 wait")


def shows_a_job_that_comes_while_it_is_open(page):
    done = call("runsync", {"input": {"prompt": "An apple is a", "schema": SCHEMA, "temperature": 0}})
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
    failed = call("runsync", {"input": {"prompt": "A story:", "schema": text, "max_tokens": 10}})
    assert failed["output"]["code"] == "OUTPUT_TRUNCATED", failed
    line = page.locator(f"tr[data-id='{failed['id']}']")
    expect(line).to_contain_text("FAILED")
    # By keyboard alone.
    line.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#events tr td:nth-child(4)").last).to_have_text("OUTPUT_TRUNCATED")
    expect(page.locator("#result")).to_contain_text("OUTPUT_TRUNCATED")


def shows_the_states_that_are_asked_for(page):
    page.select_option("#state", "FAILED")
    expect(page.locator("#jobs tr")).to_have_count(1)
    page.select_option("#state", "")
    expect(page.locator("#jobs tr")).to_have_count(2)


def shows_results_as_text(page):
    chosen = {"input": {"prompt": "Say it.", "guided_choice": [MARKUP], "temperature": 0}}
    done = call("runsync", chosen)
    assert done["output"]["output"] == MARKUP, done
    page.locator(f"tr[data-id='{done['id']}']").click()
    expect(page.locator("#result")).to_contain_text("onerror")
    assert page.title() == "Fornax: jobs"


with sync_playwright() as playwright:
    # Containers run as root, where Chromium's own sandbox does not start.
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    page = browser.new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(request.url))
    page.goto(f"{base}/console/jobs")
    for scenario in [
        asks_for_a_key,
        shows_a_job_that_comes_while_it_is_open,
        shows_a_failure_and_what_it_says,
        shows_the_states_that_are_asked_for,
        shows_results_as_text,
    ]:
        scenario(page)
        print("ok", scenario.__name__, flush=True)
    assert not complaints, complaints
    browser.close()
