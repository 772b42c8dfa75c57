"""Classifies and extracts a folder of invoices and receipts in two stages, as durable jobs of a running `fornax serve`.

    fornax serve --port 8080 --context 2048
    python3 examples/documents/run.py http://127.0.0.1:8080

Stage one asks what each document is (one batch, one shared prompt). Stage two asks for parties, lines and totals of
those that are invoices or receipts. What the model says is then checked in code: lines and tax must add up to the total,
and the booking made of each document must balance. Results go to bookings.csv; where the model differs from
truth.json is printed. Only the standard library is used.
"""

import csv
import json
import sys
import time
import urllib.request
from decimal import Decimal
from pathlib import Path

HERE = Path(__file__).parent
KIND_TASK = """You keep the books of Hillside Bakery. Say what a document is.
document_type: invoice (asks for payment), receipt (shows that something was paid), or other (a letter, a menu).
direction: sale if Hillside Bakery is the seller, purchase if Hillside Bakery pays somebody else, none otherwise.
Answer with JSON."""
CONTENT_TASK = """Copy the facts of a document as JSON.
seller: who is paid. buyer: who pays, or an empty text. lines: what was bought, with the amount of the whole line.
tax: the tax that is added, or 0.00. total: the amount that is due or was paid."""


def call(base, path, body=None, key=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{base}/v2/default/{path}", data=data)
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def batch(base, key, task, schema, documents, max_tokens):
    """One job for all documents: its results by their ids, and what it took."""
    items = [{"id": name, "text": text} for name, text in documents.items()]
    schema = json.loads((HERE / schema).read_text())
    body = {"shared_prefix": task, "items": items, "schema": schema, "temperature": 0, "max_tokens": max_tokens}
    began = time.time()
    job = call(base, "run", {"input": body}, key)
    while True:
        status = call(base, f"status/{job['id']}", key=key)
        if status["status"] not in ("IN_QUEUE", "IN_PROGRESS"):
            break
        time.sleep(0.3)
    if status["status"] != "COMPLETED":
        sys.exit(f"the job failed: {status['error']}")
    output = status["output"]
    usage = output["metadata"]["usage"]
    print(f"{len(items)} documents in {time.time() - began:.1f} s, {usage['cached']} of {usage['prompt']} prompt tokens cached")
    return {result["id"]: result for result in output["output"]}


def booking(kind, content):
    """Debit and credit of a document, from its lines and tax on one side and its total on the other."""
    parts = [(line["text"], Decimal(line["amount"])) for line in content["lines"]]
    if Decimal(content["tax"]):
        parts.append(("tax", Decimal(content["tax"])))
    total = Decimal(content["total"])
    bank = "receivable" if kind["direction"] == "sale" else ("cash" if kind["document_type"] == "receipt" else "payable")
    if kind["direction"] == "sale":
        return [(bank, total, Decimal(0))] + [(text, Decimal(0), amount) for text, amount in parts]
    return [(text, amount, Decimal(0)) for text, amount in parts] + [(bank, Decimal(0), total)]


def main():
    base = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    key = sys.argv[2] if len(sys.argv) > 2 else None
    documents = {path.name: path.read_text() for path in sorted((HERE / "in").glob("*.txt"))}
    truth = json.loads((HERE / "truth.json").read_text())
    kinds = batch(base, key, KIND_TASK, "kind.schema.json", documents, 60)
    wanted = {
        name: documents[name]
        for name, result in kinds.items()
        if result["success"] and result["output"]["document_type"] != "other"
    }
    contents = batch(base, key, CONTENT_TASK, "content.schema.json", wanted, 400) if wanted else {}
    right = {"document_type": 0, "direction": 0, "total": 0}
    with open("bookings.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["document", "type", "direction", "account", "debit", "credit", "balanced"])
        for name, facts in truth.items():
            kind = kinds[name]["output"] if kinds[name]["success"] else {}
            sure = kinds[name].get("metadata", {}).get("confidence", {})
            result = contents.get(name)
            content = result["output"] if result and result["success"] else None
            said = dict(kind, total=content["total"] if content else None)
            notes = []
            for field, value in facts.items():
                if said.get(field) == value:
                    right[field] += 1
                else:
                    notes.append(f"{field} is {value}, not {said.get(field)}")
            if result and not result["success"]:
                notes.append(f"no content: {result['code']}")
            if content:
                rows = booking(kind, content)
                debit, credit = sum(row[1] for row in rows), sum(row[2] for row in rows)
                if debit != credit:
                    notes.append(f"refused: debits {debit}, credits {credit}")
                for account, left, rightside in rows:
                    table.writerow([name, kind["document_type"], kind["direction"], account, left, rightside, debit == credit])
            sure = ", ".join(f"{place[1:]} {share:.0%}" for place, share in sure.items())
            print(f"{name:<18} {kind.get('document_type', '-'):<8} {kind.get('direction', '-'):<9} ({sure}) {'; '.join(notes) or 'right'}")
    print(", ".join(f"{field}: {count} of {len(truth)} right" for field, count in right.items()), "- see bookings.csv")


if __name__ == "__main__":
    main()
