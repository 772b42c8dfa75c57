#!/usr/bin/env python3
"""Writes vectors.json: what sampling must choose, from a second implementation of the documented order.

Needs numpy only. Run it beside this file: `python make_vectors.py`. It is the naive reading of the definition: whole
sorts, probabilities in float64, one running sum over all ids, repetitions searched for one by one; the Rust code sorts lazily,
works on unnormalised weights in whole numbers, draws a stretch of ids before a token of it and matches repetitions in
linear time, so agreement is not by construction. Cases whose outcome hangs on the last bits (a running sum within 1e-6 of a
limit, which is what weights are right to) are left out. Where transformers is installed, the filters that it has
too are compared with it first.
"""

import json
import math
import pathlib

import numpy as np

MASK32 = 0xFFFFFFFF
TENTH = float(np.float32(0.1))  # as Rust has it
NEUTRAL = dict(
    temperature=1.0, dynatemp_range=0.0, dynatemp_exponent=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0,
    top_n_sigma=0.0, xtc_probability=0.0, xtc_threshold=TENTH, dry_multiplier=0.0, dry_base=1.75, dry_allowed_length=2,
    dry_penalty_last_n=None, dry_sequence_breakers=[], mirostat=0, mirostat_tau=5.0, mirostat_eta=TENTH,
    repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, repeat_last_n=None, logit_bias=[],
    bad_words=[], allowed_token_ids=None, min_tokens=0, end_tokens=[], top_logprobs=0,
)


class TooClose(Exception):
    """The outcome hangs on rounding."""


def apart(values, limit):
    """Refuses values that are almost, but not exactly, the limit. Nothing is on the wrong side of 0."""
    if limit == 0:
        return
    distance = np.abs(np.asarray(values, np.float64) - limit)
    if np.any((distance > 0) & (distance < 1e-9)):
        raise TooClose


def philox4x32(counter, key, rounds=10):
    """Salmon et al. 2011, written from the paper with unbounded integers."""
    x, (k0, k1) = list(counter), key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(p1 >> 32) ^ x[1] ^ k0, p1 & MASK32, (p0 >> 32) ^ x[3] ^ k1, p0 & MASK32]
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return x


assert philox4x32([0] * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def uniform(seed, position, draw):
    a, b, _, _ = philox4x32([position, draw, 0, 0], (seed & MASK32, seed >> 32))
    return (((a << 32) | b) >> 11) / 2.0**53


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def tail(tokens, count):
    return tokens if count is None else tokens[max(0, len(tokens) - count):]


def candidates(case, q):
    """The ids that may be chosen."""
    ids = set(range(case["vocab"]))
    if case["mask"] is not None:
        ids = {i for i in ids if i // 32 < len(case["mask"]) and case["mask"][i // 32] >> (i % 32) & 1}
    if q["allowed_token_ids"] is not None:
        ids &= set(q["allowed_token_ids"])
    generated = tail(case["history"], case["generated"])
    for *before, end in q["bad_words"]:
        if generated[len(generated) - len(before):] == before:
            ids.discard(end)
    if case["generated"] < q["min_tokens"]:
        ids -= set(q["end_tokens"])
    return np.array(sorted(ids), np.int64)


def occurs(sequence, tokens):
    n = len(sequence)
    return any(tokens[i : i + n] == sequence for i in range(len(tokens) - n + 1))


def dry_penalty(token, history, q):
    """The longest end of the history, not reaching back across a breaker, that was once followed by this token."""
    breakers = q["dry_sequence_breakers"]
    if [token] in breakers:
        return 0.0
    reach = len(history)
    for after in range(len(history)):
        before = history[: len(history) - after]
        if any(before[len(before) - len(b):] == b for b in breakers if len(b) <= len(before)):
            reach = after
            break
    for length in range(reach, q["dry_allowed_length"] - 1, -1):
        if occurs(history[len(history) - length:] + [token], history):
            return q["dry_multiplier"] * q["dry_base"] ** (length - q["dry_allowed_length"])
    return 0.0


def adjusted(logits, case, q):
    out = logits[: case["vocab"]].astype(np.float32).copy()
    window = tail(case["history"], q["repeat_last_n"])
    own = tail(window, case["generated"])
    dry_window = tail(case["history"], q["dry_penalty_last_n"])

    def change(token, value):
        out[token] = np.float32(value)

    for token, bias in q["logit_bias"]:
        change(token, float(out[token]) + bias)
    for token in range(case["vocab"]):
        x = float(out[token])
        if q["repetition_penalty"] != 1 and token in window:
            change(token, x / q["repetition_penalty"] if x > 0 else x * q["repetition_penalty"])
        if token in own:
            change(token, float(out[token]) - own.count(token) * q["frequency_penalty"] - q["presence_penalty"])
        if q["dry_multiplier"] > 0 and token in dry_window:
            change(token, float(out[token]) - dry_penalty(token, dry_window, q))
    return out


def reach(p, limit):
    """How many of these, and at least one, until their sum reaches the limit."""
    if limit >= 1:
        return len(p)
    running = np.cumsum(p)
    if np.min(np.abs(running - limit)) < 1e-6:
        raise TooClose
    return int(np.searchsorted(running, limit)) + 1


def truncated(ids, x, q, excluding):
    """Ids and logits, the most likely first, that steps 4 to 6 keep."""
    p = softmax(x)
    keep = len(ids)
    if q["top_k"]:
        keep = min(keep, q["top_k"])
    keep = min(keep, reach(p, q["top_p"]))
    apart(p / p[0], q["min_p"])
    keep = min(keep, int((p / p[0] >= q["min_p"]).sum()))
    if q["top_n_sigma"]:
        floor = x[0] - q["top_n_sigma"] * np.std(x)
        apart(x, floor)
        keep = min(keep, int((x >= floor).sum()))
    ids, x = ids[:keep], x[:keep]
    if q["typical_p"] < 1:
        p = softmax(x)
        surprise = -np.log(p)
        distance = np.abs(surprise - (p * surprise).sum())
        order = np.lexsort((np.arange(len(p)), np.round(distance, 12)))
        gaps = np.diff(distance[order])
        if np.any((gaps < 1e-9) & (np.diff(x[order]) != 0)):
            raise TooClose
        picked = np.sort(order[: reach(p[order], q["typical_p"])])
        ids, x = ids[picked], x[picked]
    if excluding:
        p = softmax(x)
        apart(p, q["xtc_threshold"])
        likely = int((p >= q["xtc_threshold"]).sum())
        ids, x = ids[max(0, likely - 1):], x[max(0, likely - 1):]
    return ids, x


def heated(x, q):
    temperature = q["temperature"]
    if q["dynatemp_range"] and len(x) > 1:
        p = softmax(x)
        p = p[p > 0]
        share = min(1.0, max(0.0, float(-(p * np.log(p)).sum()) / math.log(len(x))))
        low, high = max(0.0, temperature - q["dynatemp_range"]), temperature + q["dynatemp_range"]
        temperature = low + (high - low) * share ** q["dynatemp_exponent"]
    if temperature == 0:
        return np.where(np.arange(len(x)) == 0, 0.0, -np.inf)
    return x / temperature


def surprising(ids, x, case, q):
    """Mirostat's truncation."""
    x = x / q["temperature"]
    p = softmax(x)
    if q["mirostat"] == 2:
        apart(-np.log2(p), case["mu"])
        keep = max(1, int((-np.log2(p) <= case["mu"]).sum()))
    else:
        top = x[:100]
        if len(top) < 2:
            return ids, x
        i = np.arange(1, len(top))
        t, b = np.log((i + 1) / i), top[:-1] - top[1:]  # the logarithm of a ratio of probabilities
        s = float((t * b).sum() / (t * t).sum())
        e = s - 1
        k = ((e * 2.0 ** case["mu"]) / (1 - float(case["vocab"]) ** -e)) ** (1 / s)
        apart([k], round(k))
        keep = max(1, int(min(k, len(ids))))
    return ids[:keep], x[:keep]


def distribution(logits, case, excluding):
    """The ids that may be drawn, the most likely first, with their probabilities."""
    q = {**NEUTRAL, **case["parameters"]}
    ids = candidates(case, q)
    x = adjusted(logits, case, q)[ids].astype(np.float64)
    order = np.lexsort((ids, -x))
    ids, x = ids[order], x[order]
    if q["temperature"] == 0:
        return ids[:1], np.ones(1)
    if q["mirostat"]:
        ids, x = surprising(ids, x, case, q)
        return ids, softmax(x)
    ids, x = truncated(ids, x, q, excluding)
    return ids, softmax(heated(x, q))


def choose(logits, case):
    """The case with what comes out of it."""
    q = {**NEUTRAL, **case["parameters"]}
    strikes = uniform(case["seed"], case["position"], 1) < q["xtc_probability"]
    ids, p = distribution(logits, case, strikes)
    by_id = np.argsort(ids)
    ids, p = ids[by_id], p[by_id]
    running, u = np.cumsum(p), uniform(case["seed"], case["position"], 0)
    if np.min(np.abs(running[:-1] - u), initial=1.0) < 1e-6:
        raise TooClose
    rank = min(int(np.searchsorted(running, u, side="right")), len(ids) - 1)
    real = logits[: case["vocab"]].astype(np.float64)
    logprobs = real - real.max() - np.log(np.exp(real - real.max()).sum())
    top = sorted(range(case["vocab"]), key=lambda i: (-real[i], i))[: q["top_logprobs"]]
    out = {"token": int(ids[rank]), "logprob": round(float(logprobs[ids[rank]]), 7)}
    if top:
        out["top"] = [[i, round(float(logprobs[i]), 7)] for i in top]
    if q["mirostat"]:
        out["next_mu"] = float(np.float32(case["mu"] - q["mirostat_eta"] * (-math.log2(p[rank]) - q["mirostat_tau"])))
    return out


def exact(value):
    """Every number as the f32 that Rust will read."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, list):
        return [exact(v) for v in value]
    return value


def compare_with_transformers(rng):
    """Each filter alone keeps what transformers' keeps, and its penalty is the same number."""
    try:
        import torch
        import transformers.generation.logits_process as hf
    except ImportError:
        return "not installed, nothing compared"
    compared = 0
    for _ in range(300):
        size = int(rng.integers(5, 400))
        row = rng.normal(0, rng.choice([0.5, 2, 5]), size).astype(np.float32)
        value = float(rng.choice([0.1, 0.3, 0.5, 0.9, 0.95]))
        history = [int(t) for t in rng.integers(0, size, 30)]
        for name, value, processor in [
            ("top_k", int(rng.integers(1, 50)), lambda v: hf.TopKLogitsWarper(v)),
            ("top_p", value, lambda v: hf.TopPLogitsWarper(v)),
            ("min_p", value, lambda v: hf.MinPLogitsWarper(v)),
            ("typical_p", value, lambda v: hf.TypicalLogitsWarper(v)),
            ("repetition_penalty", 1.0 + value, lambda v: hf.RepetitionPenaltyLogitsProcessor(v)),
        ]:
            case = dict(vocab=size, mask=None, history=history, generated=10, parameters={name: value})
            theirs = processor(value)(torch.tensor([history]), torch.tensor(row, dtype=torch.float64)[None])[0].numpy()
            if name == "repetition_penalty":
                assert np.allclose(theirs, adjusted(row, case, {**NEUTRAL, name: value}), atol=1e-5), name
            else:
                try:
                    ids, p = distribution(row, case, False)
                except TooClose:
                    continue
                finite = np.flatnonzero(np.isfinite(theirs))
                assert sorted(ids.tolist()) == finite.tolist(), (name, value, size)
                assert np.allclose(p, softmax(theirs[ids]), atol=1e-9), name
            compared += 1
    return f"{compared} cases agree"


ALONE = [
    dict(temperature=0.0), dict(temperature=0.2), dict(temperature=1.5), dict(temperature=20.0),
    dict(dynatemp_range=0.5), dict(temperature=0.8, dynatemp_range=0.5, dynatemp_exponent=2.0),
    dict(dynatemp_range=3.0, dynatemp_exponent=0.3), dict(dynatemp_range=0.5, dynatemp_exponent=0.0),
    dict(top_k=1), dict(top_k=2), dict(top_k=40), dict(top_k=5000),
    dict(top_p=0.0), dict(top_p=0.3), dict(top_p=0.9), dict(top_p=0.999),
    dict(min_p=0.02), dict(min_p=0.3), dict(min_p=1.0),
    dict(typical_p=0.0), dict(typical_p=0.2), dict(typical_p=0.9),
    dict(top_n_sigma=0.5), dict(top_n_sigma=1.0), dict(top_n_sigma=3.0),
    dict(xtc_probability=1.0, xtc_threshold=0.01), dict(xtc_probability=0.5, xtc_threshold=0.05),
    dict(xtc_probability=1.0, xtc_threshold=0.0), dict(xtc_probability=1.0, xtc_threshold=0.6),
    dict(dry_multiplier=2.0), dict(dry_multiplier=0.8, dry_base=1.2, dry_allowed_length=1),
    dict(dry_multiplier=2.0, dry_penalty_last_n=7), dict(dry_multiplier=2.0, dry_penalty_last_n=0),
    dict(dry_multiplier=2.0, dry_allowed_length=1, dry_sequence_breakers=[[3]]),
    dict(dry_multiplier=2.0, dry_allowed_length=1, dry_sequence_breakers=[[1, 2], [4]]),
    dict(dry_multiplier=3.0, dry_base=4.0), dict(dry_multiplier=1.0, dry_allowed_length=900),
    dict(mirostat=1), dict(mirostat=2), dict(mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5, temperature=0.7),
    dict(mirostat=1, mirostat_tau=2.0, mirostat_eta=0.3, temperature=1.4), dict(mirostat=2, mirostat_eta=0.0),
    dict(repetition_penalty=1.3), dict(repetition_penalty=0.5), dict(repetition_penalty=50.0, repeat_last_n=4),
    dict(presence_penalty=1.5), dict(presence_penalty=-2.0), dict(frequency_penalty=0.7),
    dict(frequency_penalty=-1.0, repeat_last_n=9), dict(presence_penalty=1.0, repeat_last_n=0),
    dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, repeat_last_n=10_000),
    dict(logit_bias=[[3, 5.0], [4, -100.0], [3, 1.0]]), dict(logit_bias=[[0, 1e30]]),
    dict(bad_words=[[3], [5]]), dict(bad_words=[[1, 2], [2, 3], [1], [0, 1, 2, 3]]),
    dict(allowed_token_ids=[1, 7, 3, 3]), dict(allowed_token_ids=[2]),
    dict(min_tokens=6, end_tokens=[0, 12, 8]), dict(min_tokens=3, end_tokens=[1, 2, 3]),
    dict(top_logprobs=1), dict(top_logprobs=20), dict(top_logprobs=60),
]


def combination(rng):
    """A few parameters at once. Mirostat replaces the truncation, and greedy needs no rare sampler."""
    pick = lambda *values: values[int(rng.integers(len(values)))]
    q = {}
    kind = pick("plain", "plain", "plain", "greedy", "mirostat")
    q["temperature"] = 0.0 if kind == "greedy" else pick(0.4, 0.9, 1.0, 1.7)
    if kind == "mirostat":
        q.update(mirostat=pick(1, 2), mirostat_tau=pick(2.0, 4.0))
    else:
        q.update(top_k=pick(0, 0, 3, 40), top_p=pick(1.0, 0.6, 0.95), min_p=pick(0.0, 0.0, 0.05))
        q.update(top_n_sigma=pick(0.0, 0.0, 1.5, 2.5))
    if kind == "plain":
        q.update(typical_p=pick(1.0, 1.0, 0.5, 0.95), xtc_probability=pick(0.0, 0.0, 0.5, 1.0))
        q.update(xtc_threshold=pick(0.02, 0.1, 0.3), dynatemp_range=pick(0.0, 0.0, 0.3, 1.0))
    if rng.random() < 0.5:
        q.update(repetition_penalty=pick(1.0, 1.1, 1.5), presence_penalty=pick(0.0, 0.6), frequency_penalty=pick(0.0, 0.4))
        q["repeat_last_n"] = pick(None, 3, 8, 64)
    if rng.random() < 0.4:
        q.update(dry_multiplier=pick(0.8, 2.0), dry_allowed_length=pick(1, 2, 3), dry_base=pick(1.1, 1.75))
        q.update(dry_penalty_last_n=pick(None, 12), dry_sequence_breakers=pick([], [[2]], [[1, 2], [6, 1]]))
    if rng.random() < 0.3:
        q["logit_bias"] = [[int(t), float(np.round(rng.normal(0, 3), 2))] for t in rng.integers(0, 14, 3)]
    if rng.random() < 0.3:
        q.update(bad_words=pick([[8]], [[1, 2], [2, 1], [4]]), min_tokens=pick(0, 5, 50), end_tokens=[1, 7])
    if rng.random() < 0.2:
        q["allowed_token_ids"] = [int(t) for t in rng.permutation(14)[:9]]
    if rng.random() < 0.2:
        q["top_logprobs"] = pick(1, 5)
    return {name: value for name, value in q.items() if value != NEUTRAL[name]}


def main():
    rng = np.random.default_rng(20240611)
    print("transformers:", compare_with_transformers(rng))

    rows = []
    for size, spread in [(24, 1.0), (50, 4.0), (300, 2.0), (500, 0.3), (700, 6.0)]:
        row = np.round(rng.normal(0, spread, size), 3).astype(np.float32)
        row[size // 3] = row[size // 2] = row.max()  # ties at the top
        rows.append(row)
    rows.append(np.array([0.0, -0.0, 5.0, -0.0, 0.0, 5.0, -3.5, 1e-3] * 5, np.float32))
    # Several stretches of ids, whose largest logits are far from each other.
    size = 9000
    rows.append(np.round(rng.normal(0, 1.5, size) + np.linspace(-2, 2, size), 1).astype(np.float32))
    # Few different tokens, so that they repeat; the likely ones of some rows among them; one beyond the vocabulary.
    histories = [
        [], [3], [1, 2, 3, 1, 2, 3, 1, 2], [5] * 30, [int(t) for t in rng.integers(0, 5, 60)],
        [int(t) for t in rng.choice([8, 12, 16, 25, 2, 1], 40)], [8, 12, 2, 5, 100_000, 8, 12, 2, 5, 8, 12],
        [int(t) for t in np.tile([1, 2, 4, 8, 12, 3, 6], 9)],
    ]

    cases = []

    def add(parameters):
        which, past = int(rng.integers(len(rows))), int(rng.integers(len(histories)))
        size, words = len(rows[which]), None
        if rng.random() < 0.15:
            words = [int(w) for w in rng.integers(0, 2**32, (size + 31) // 32, dtype=np.uint64)]
            words[0] |= 1 << 2 | 1 << 3
        case = {
            "row": which,
            "position": int(rng.integers(0, 100_000)),
            "seed": int(rng.integers(0, 2**63)) * 2 + 1,
            "vocab": int(size - rng.choice([0, 0, 3, 9])),
            "past": past,
            "generated": int(rng.integers(0, len(histories[past]) + 1)),
            "parameters": {name: exact(value) for name, value in parameters.items()},
        }
        if words:
            case["mask"] = words
        if "mirostat" in parameters:
            case["mu"] = exact(float(rng.choice([0.0, 1.3, 4.1, 10.0])))
        full = {"mask": None, **case, "history": histories[past]}
        if len(candidates(full, {**NEUTRAL, **case["parameters"]})) == 0:
            return
        try:
            cases.append({**case, **choose(rows[which], full)})
        except TooClose:
            pass

    for parameters in ALONE:
        before = len(cases)
        for _ in range(6):
            add(parameters)
        assert len(cases) > before, parameters
    for _ in range(330):
        add(combination(rng))

    # Exact distributions for the chi-squared test: 24 ids keep every expected count above five.
    distributions = []
    for parameters in [
        {}, dict(temperature=0.7, top_p=0.9), dict(temperature=1.5, top_k=6), dict(min_p=0.3),
        dict(temperature=2.0, top_k=15, top_p=0.8, min_p=0.05), dict(typical_p=0.6), dict(top_n_sigma=1.0),
        dict(dynatemp_range=0.6), dict(xtc_probability=0.4, xtc_threshold=0.05),
        dict(xtc_probability=0.9, xtc_threshold=0.06, temperature=1.3), dict(xtc_probability=1.0, xtc_threshold=0.04),
        dict(repetition_penalty=1.5, frequency_penalty=0.2),
    ]:
        parameters = {name: exact(value) for name, value in parameters.items()}
        case = dict(vocab=24, mask=None, history=histories[2], generated=4, parameters=parameters)
        share = parameters.get("xtc_probability", 0.0)
        mixed = np.zeros(24)
        for excluding, weight in [(False, 1 - share), (True, share)]:
            if weight:
                ids, p = distribution(rows[0], case, excluding)
                mixed[ids] += weight * p
        distributions.append({
            "parameters": parameters, "past": 2, "generated": 4,
            "ids": [int(i) for i in np.flatnonzero(mixed)], "probabilities": mixed[mixed > 0].tolist(),
        })

    out = {
        "uniform": [
            {"seed": s, "position": n, "draw": d, "u": uniform(s, n, d)}
            for s, n, d in [(0, 0, 0), (1, 2, 3), (2**64 - 1, 2**32 - 1, 0), (0x0123456789ABCDEF, 77, 1)]
        ],
        "rows": [[float(f"{x:.6g}") for x in row.tolist()] for row in rows],
        "histories": histories,
        "cases": cases,
        "distributions": distributions,
    }
    short = lambda x: float(f"{x:.9g}") if isinstance(x, float) and abs(x) > 1e-30 and float(np.float32(x)) == x else x
    walk = lambda v: {k: walk(x) for k, x in v.items()} if isinstance(v, dict) else [walk(x) for x in v] if isinstance(v, list) else short(v)
    for case in out["cases"] + out["distributions"]:
        case["parameters"] = walk(case["parameters"])
    text = json.dumps(out, separators=(",", ":")).replace('{"row"', '\n{"row"')
    pathlib.Path(__file__).with_name("vectors.json").write_text(text + "\n")
    seen = {name for case in cases for name in case["parameters"]}
    assert seen == set(NEUTRAL), set(NEUTRAL) - seen
    print(len(cases), "cases,", len(text), "bytes")


main()
