"""Attention over latent rows alone, against PyTorch in f64: how far is it from the truth, has it the same bits however it is
spread over blocks, and how long does it take? `python3 latent.py [check] [decode] [prompt]` on a machine with nvcc, PyTorch and a
Hopper card. The kernels are ../kernels/latent.cu and latent_wgmma.cu (0 stages), launched as src/ops/latent.rs launches them."""

import ctypes
import math
import os
import statistics
import struct
import subprocess
import sys
import tempfile

import torch

KERNELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "kernels")
LATENT, TURNED, EACH, PAGE, SPAN = 512, 64, 192, 32, 1024
WIDTH = LATENT + TURNED
cuda = ctypes.CDLL("libcuda.so.1")
folder = tempfile.mkdtemp()
functions = {}
torch.zeros(1, device="cuda")
partials = torch.zeros(16 << 20, device="cuda")


class Config(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "gx gy gz bx by bz shared".split()] + [
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


def done(code, what):
    if code:
        raise RuntimeError(f"{what}: {code}")


def shared(rows, stages, kind):
    if stages == 0:
        return 1024 + 3 * 64 * WIDTH * 2
    parts = 2 if kind == "bf16" else 1
    page = PAGE * WIDTH * 2
    staged, wide = (PAGE * (WIDTH + 1), page) if kind == "fp8" else (page, 0)
    return parts * rows * WIDTH * 2 + stages * staged + wide + 4 * rows * 36 * 4 + 4 * rows * 4


def compile_all(wanted):
    """Starts nvcc for each, and waits."""
    running = []
    for rows, stages, kind in wanted:
        defines = dict(LATENT=LATENT, TURNED=TURNED, KV_BYTES=1 if kind == "fp8" else 2, KV_BF16=int(kind == "bf16"), ABLE_WGMMA=1,
                       ABLE_BULK=1, ABLE_CLUSTERS=1, HOST_SHARED_BYTES=shared(rows, stages, kind))
        unit, name = ("latent", "latent_attention") if stages else ("latent_wgmma", "latent_wgmma")
        defines |= dict(ROWS=rows, STAGES=stages) if stages else {}
        running.append((start(unit, f"{rows}_{stages}_{kind}", defines), (rows, stages, kind), name))
    merge = dict(LATENT=LATENT, TURNED=TURNED, KV_BYTES=2, KV_BF16=0, ABLE_WGMMA=1, ABLE_BULK=1, ABLE_CLUSTERS=1)
    running.append((start("latent_merge", "merge", merge), "merge", "latent_merge"))
    for (process, image), key, name in running:
        out = process.communicate()[0].decode()
        if process.returncode:
            print(key, "does not compile:", out[-2000:])
            continue
        module, found = ctypes.c_void_p(), ctypes.c_void_p()
        done(cuda.cuModuleLoadData(ctypes.byref(module), open(image, "rb").read()), image)
        done(cuda.cuModuleGetFunction(ctypes.byref(found), module, name.encode()), name)
        done(cuda.cuFuncSetAttribute(found, 8, 219 << 10), "dynamic shared memory")
        functions[key] = found


def start(unit, name, defines):
    image = f"{folder}/{name}.cubin"
    flags = ["-std=c++17", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", f"-I{KERNELS}", *[f"-D{name}={value}" for name, value in defines.items()]]
    command = ["nvcc", *flags, f"{KERNELS}/{unit}.cu", "-o", image]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT), image


def launch(kernel, grid, block, bytes, args):
    attributes = (Attribute * 1)()
    attributes[0].id, attributes[0].value[0] = 6, 1  # programmatic dependent launch
    stream = torch.cuda.current_stream().cuda_stream
    config = Config(*grid, block, 1, 1, bytes, stream, ctypes.addressof(attributes), 1)
    held = [ctypes.create_string_buffer(arg, len(arg)) for arg in args]
    pointers = (ctypes.c_void_p * len(args))(*[ctypes.addressof(arg) for arg in held])
    done(cuda.cuLaunchKernelEx(ctypes.byref(config), kernel, pointers, None), "launch")


def pointer(tensor):
    return struct.pack("<Q", 0 if tensor is None else tensor.data_ptr())


def ints(*values):
    return struct.pack(f"<{len(values)}i", *values)


class Case:
    """Sequences, each with tokens in front of the step (start) and in it (length), whose pages lie in any order."""

    def __init__(self, heads, rows, kind="f16"):
        torch.manual_seed(0)
        self.heads, self.rows, self.kind, self.scale = heads, rows, kind, WIDTH**-0.5
        self.tokens = sum(length for _, length in rows)
        needed = [-(-(start + length) // PAGE) for start, length in rows]
        self.tables = (torch.randperm(sum(needed)) + 1).split(needed)
        dtype = torch.bfloat16 if kind == "bf16" else torch.float16
        if kind == "fp8":
            self.pages = torch.randint(0, 120, (sum(needed) + 1, PAGE * (WIDTH + 1)), device="cuda", dtype=torch.uint8)
            self.pages[:, PAGE * WIDTH :] = 120
        else:
            self.pages = torch.randn(sum(needed) + 1, PAGE, WIDTH, device="cuda", dtype=dtype)
        self.absorbed = torch.randn(self.tokens, heads, LATENT, device="cuda")
        self.queries = torch.randn(self.tokens, heads, EACH, device="cuda")
        places, lasts, starts, first, table = [], [], [], 0, self.tokens
        for (start, length), pages in zip(rows, self.tables):
            places += range(start, start + length)
            lasts += [first + length - 1] * length
            starts += [table] * length
            first, table = first + length, table + len(pages)
        array = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
        self.places, self.lasts = array(places), array(lasts)
        self.table = torch.cat([array(starts), *[pages.int().cuda() for pages in self.tables]])
        self.spans = max(places) // SPAN + 1

    def run(self, out, rows, stages, split=False, tokens=None):
        """With `split` a block has a span."""
        key = rows, stages, self.kind
        groups = -(-self.heads // rows)
        each = -(-self.heads // groups)
        tokens = tokens or (1 if self.tokens == len(self.rows) else rows // each)
        step = b"".join(map(pointer, [None, None, None, self.places, None, None, self.lasts, None, self.table]))
        step += ints(self.tokens, self.tokens, 0, 0)
        spans = self.spans if split else 0
        limit = self.tokens
        if split:
            most = (64 << 20) // (self.heads * spans * (LATENT + 2) * 4) // tokens * tokens
            limit = -(-self.tokens // -(-self.tokens // most))
            limit = -(-limit // tokens) * tokens
        for first in range(0, self.tokens, limit):
            params = ints(self.heads, EACH, 0, 0) + struct.pack("<f", self.scale) + ints(each, tokens, first, spans, limit) + pointer(partials)
            args = [step, params, pointer(self.absorbed), pointer(self.queries), pointer(self.pages), pointer(out)]
            blocks = -(-min(limit, self.tokens - first) // tokens)
            threads = 256 if stages else 384
            launch(functions[key], (groups, blocks, max(spans, 1)), threads, shared(rows, stages, self.kind), args)
            if split:
                launch(functions["merge"], (self.heads, min(limit, self.tokens - first), 1), 128, 0, [step, params, args[5]])

    def out(self):
        return torch.full((self.tokens, self.heads, LATENT), float("nan"), device="cuda")

    def wanted(self):
        results, first = [], 0
        for (start, length), table in zip(self.rows, self.tables):
            if self.kind == "fp8":
                codes = self.pages[table.cuda(), : PAGE * WIDTH].view(torch.float8_e4m3fn).double() * 2.0 ** (120 - 127)
                stored = codes.view(-1, WIDTH)[: start + length]
            else:
                stored = self.pages[table.cuda()].double().view(-1, WIDTH)[: start + length]
            queries = torch.cat([self.absorbed[first : first + length], self.queries[first : first + length, :, :TURNED]], -1).double()
            scores = torch.einsum("lhd,nd->hln", queries, stored) * self.scale
            at, own = torch.arange(start + length, device="cuda")[None], torch.arange(start, start + length, device="cuda")[:, None]
            weights = scores.masked_fill((at > own)[None], -math.inf).softmax(-1)
            results.append(torch.einsum("hln,nd->lhd", weights, stored[:, :LATENT]))
            first += length
        return torch.cat(results)


VARIANTS = [(64, 0), (64, 2), (32, 3), (16, 3)]


def told(kind, heads, rows, out, wanted, same):
    error = (((out - wanted) ** 2).sum(-1) / (wanted**2).sum(-1)).max().item()
    print(f"{kind} {heads} heads {rows}: {error:.1e}; {same}", flush=True)


def check():
    print("largest error of a query (mean square, relative), and whether each way has the same bits")
    for kind, ways in [("f16", VARIANTS), ("fp8", [(64, 2), (16, 3)]), ("bf16", [(32, 2), (16, 3)])]:
        for heads, rows in [(128, [(0, 40)]), (20, [(2100, 70), (5, 1), (1023, 2)]), (16, [(0, 5), (40, 1), (10, 30), (100, 64)]), (64, [(8000, 1), (1500, 1)])]:
            case = Case(heads, rows, kind)
            wanted, first = case.wanted(), None
            same = []
            for way in ways:
                for split, tokens in [(False, None), (True, None), (False, 1)]:
                    out = case.out()
                    case.run(out, *way, split=split, tokens=tokens)
                    torch.cuda.synchronize()
                    first = out if first is None else first
                    same.append(torch.equal(out.view(torch.int32), first.view(torch.int32)))
                if way[1] == 0:
                    # Its tiles are larger: it has bits of its own.
                    told(kind, heads, rows, first, wanted, same)
                    first, same = None, []
            told(kind, heads, rows, first, wanted, same)


def microseconds(body):
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
        body()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / 2


def copy_rate():
    """Bytes a second, read and written."""
    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    rate = 2 * 4 * a.numel() / microseconds(lambda: torch.mul(a, 2, out=b)) * 1e6
    print(f"copy rate {rate / 1e12:.2f} TB/s")
    return rate


def rates(us, streams, context, heads, rate, row_bytes):
    # Rows once, queries and results once.
    bytes = streams * (context * row_bytes + heads * (WIDTH + LATENT) * 4)
    flops = 2 * streams * context * heads * (WIDTH + LATENT)
    return f"{us:.0f} us, {100 * bytes / us * 1e6 / rate:.0f} % of the copy rate, {flops / us / 1e6:.0f} TFLOP/s"


def decode():
    rate = copy_rate()
    for kind, ways in [("f16", VARIANTS), ("fp8", [(64, 2)]), ("bf16", [(32, 2)])]:
        for streams, context in [(64, 8192), (1, 8192), (8, 8192)]:
            for heads in (16, 20, 32, 64, 128):
                case = Case(heads, [(context - 1, 1)] * streams, kind)
                out = case.out()
                for rows, stages in ways:
                    if stages and (rows > 16 and rows // 2 >= heads or rows == 16 and heads > 20):
                        continue
                    for split in (False, True):
                        us = microseconds(lambda: case.run(out, rows, stages, split))
                        row_bytes = WIDTH + 1 if kind == "fp8" else 2 * WIDTH
                        print(f"{kind} {streams} x {context}, {heads} heads, {rows} rows, {stages} stages, {'spans' if split else 'whole'}: "
                              + rates(us, streams, context, heads, rate, row_bytes), flush=True)
                del case, out


def prompt():
    print("prompts, what causal attention needs")
    for heads, tokens in [(128, 2048), (16, 2048), (64, 8192)]:
        case = Case(heads, [(0, tokens)])
        out = case.out()
        needed = heads * (WIDTH + LATENT) * tokens * (tokens + 1)
        for rows, stages in [(64, 0), (64, 2)]:
            us = microseconds(lambda: case.run(out, rows, stages))
            print(f"{heads} heads, {tokens} tokens, {rows} rows, {stages} stages: {us:.0f} us, {needed / us / 1e6:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    compile_all([(*way, "f16") for way in VARIANTS] + [(64, 2, "fp8"), (16, 3, "fp8"), (32, 2, "bf16"), (16, 3, "bf16")])
    for part in sys.argv[1:] or ["check", "decode", "prompt"]:
        {"check": check, "decode": decode, "prompt": prompt}[part]()
