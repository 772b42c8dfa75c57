#!/usr/bin/env python3
"""Writes vectors.json: what sampling must choose, from a second implementation of the documented order.

Needs numpy only. Run it beside this file: `python make_vectors.py`. The full order is sorted here and every
probability is float64; the Rust code sorts lazily and works on unnormalised weights, so agreement is not by
construction. Cases whose outcome hangs on the last bits (a running sum within 1e-9 of a limit) are left out.
"""

import json
import pathlib

import numpy as np

MASK32 = 0xFFFFFFFF


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


def distribution(logits, case):
    """The kept ids in order and their renormalised probabilities; None when a limit is too close to call."""
    ids = np.array([i for i in range(case["vocab"]) if case["mask"] is None or case["mask"][i // 32] >> (i % 32) & 1])
    scaled = logits[ids].astype(np.float64) / np.float64(np.float32(case["temperature"]))
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.lexsort((ids, -logits[ids].astype(np.float64)))
    ids, p = ids[order], p[order]
    keep = len(ids)
    if case["top_k"]:
        keep = min(keep, case["top_k"])
    top_p, min_p = float(np.float32(case["top_p"])), float(np.float32(case["min_p"]))
    if top_p < 1.0:
        running = np.cumsum(p)
        if np.min(np.abs(running - top_p)) < 1e-9:
            return None
        keep = min(keep, int(np.searchsorted(running, top_p)) + 1)
    ratio = p / p[0]
    distance = np.abs(ratio - min_p)
    if np.any((distance > 0) & (distance < 1e-9)):
        return None
    keep = max(1, min(keep, int((ratio >= min_p).sum())))
    p = p[:keep]
    return ids[:keep], p / p.sum()


def choose(logits, case):
    real = logits[: case["vocab"]].astype(np.float64)
    if case["temperature"] == 0:
        allowed = [i for i in range(case["vocab"]) if case["mask"] is None or case["mask"][i // 32] >> (i % 32) & 1]
        token = min(allowed, key=lambda i: (-real[i], i))
    else:
        kept = distribution(logits, case)
        if kept is None:
            return None
        ids, p = kept
        running, u = np.cumsum(p), uniform(case["seed"], case["position"], 0)
        if np.min(np.abs(running[:-1] - u), initial=1.0) < 1e-9:
            return None
        token = int(ids[min(int(np.searchsorted(running, u, side="right")), len(ids) - 1)])
    logprob = real[token] - real.max() - np.log(np.exp(real - real.max()).sum())
    return int(token), float(logprob)


def main():
    rng = np.random.default_rng(20240611)
    rows = []
    for size, spread in [(24, 1.0), (50, 4.0), (300, 2.0), (700, 0.3), (900, 6.0)]:
        row = np.round(rng.normal(0, spread, size), 3).astype(np.float32)
        row[size // 3] = row[size // 2] = row.max()  # ties at the top
        rows.append(row)
    rows.append(np.array([0.0, -0.0, 5.0, -0.0, 0.0, 5.0, -3.5, 1e-3] * 5, np.float32))

    cases = []
    for number in range(420):
        which = int(rng.integers(len(rows)))
        size = len(rows[which])
        mask = None
        if rng.random() < 0.35:
            words = rng.integers(0, 2**32, (size + 31) // 32, dtype=np.uint64)
            mask = [int(w) for w in words]
            mask[0] |= 1 << 3
        case = {
            "logits": which,
            "position": int(rng.integers(0, 100_000)),
            "seed": int(rng.integers(0, 2**63)) * 2 + 1,
            "temperature": float(np.float32(rng.choice([0.0, 0.2, 0.7, 1.0, 1.5, 20.0]))),
            "top_k": int(rng.choice([0, 0, 1, 2, 40, 100, 5000])),
            "top_p": float(np.float32(rng.choice([1.0, 1.0, 0.0, 0.3, 0.9, 0.95, 0.999]))),
            "min_p": float(np.float32(rng.choice([0.0, 0.0, 0.02, 0.3, 1.0]))),
            "vocab": int(size - rng.choice([0, 0, 3, 9])),
            "mask": mask,
        }
        chosen = choose(rows[which], case)
        if chosen:
            cases.append({**case, "token": chosen[0], "logprob": chosen[1]})

    # Exact distributions for the chi-squared test: 24 ids keep every expected count above five.
    distributions = []
    for temperature, top_k, top_p, min_p in [(1, 0, 1, 0), (0.7, 0, 0.9, 0), (1.5, 6, 1, 0), (1, 0, 1, 0.1), (2, 15, 0.8, 0.05)]:
        case = dict(vocab=24, mask=None, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        ids, p = distribution(rows[0], case)
        distributions.append({**case, "logits": 0, "ids": ids.tolist(), "probabilities": p.tolist()})

    out = {
        "uniform": [
            {"seed": s, "position": n, "draw": d, "u": uniform(s, n, d)}
            for s, n, d in [(0, 0, 0), (1, 2, 3), (2**64 - 1, 2**32 - 1, 0), (0x0123456789ABCDEF, 77, 1)]
        ],
        "rows": [[float(f"{x:.6g}") for x in row.tolist()] for row in rows],
        "cases": cases,
        "distributions": distributions,
    }
    text = json.dumps(out, separators=(",", ":")).replace('{"logits"', '\n{"logits"')
    pathlib.Path(__file__).with_name("vectors.json").write_text(text + "\n")
    print(len(cases), "cases,", len(text), "bytes")


main()
