"""The attention kernels alone, against PyTorch in f64: do all ways of sharing out a token's keys give the same bits, how far are
they from the truth, and how long do they take? `python3 attention.py [check] [decode] [prompt]` on a machine with nvcc, PyTorch
and a Hopper card. Kernels are those of ../kernels, launched as src/ops/attention.rs launches them."""

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
TILE, PAGE, BLOCK_ROWS, CLUSTER_TILES = 64, 32, 64, 32
RING = {64: 6, 128: 4, 20: 0, 256: 0}  # tiles in the ring of attention_wgmma by the head's size
SHAPES = {"7B": (128, 7, 4), "0.5B": (64, 7, 2)}  # head size, query heads per K/V head, K/V heads
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


def check_call(code, what):
    if code:
        raise RuntimeError(f"{what}: {code}")


def function(unit, name, dim, shared, bf16):
    key = unit, name, dim, shared, bf16
    if key not in functions:
        image = f"{folder}/{unit}_{dim}_{shared}_{bf16}.cubin"
        if not os.path.exists(image):
            defines = dict(DIM=dim, GROUP=shared, KV_BYTES=2, KV_BF16=int(bf16), CAPPED=0, SINKS=0, BOTH=0, RING=RING[dim], ROTATES=0)
            flags = ["-std=c++17", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", f"-I{KERNELS}"]
            flags += [f"-D{name}={value}" for name, value in defines.items()]
            subprocess.run(["nvcc", *flags, f"{KERNELS}/{unit}.cu", "-o", image], check=True)
        module, found = ctypes.c_void_p(), ctypes.c_void_p()
        check_call(cuda.cuModuleLoadData(ctypes.byref(module), open(image, "rb").read()), image)
        check_call(cuda.cuModuleGetFunction(ctypes.byref(found), module, name.encode()), name)
        check_call(cuda.cuFuncSetAttribute(found, 8, 219 << 10), "dynamic shared memory")
        check_call(cuda.cuFuncSetAttribute(found, 14, 1), "clusters of 16")
        functions[key] = found
    return functions[key]


def launch(kernel, grid, block, shared, args, cluster=1):
    attributes = (Attribute * 2)()
    attributes[0].id, attributes[0].value[0] = 6, 1  # programmatic dependent launch
    attributes[1].id = 4
    attributes[1].value[0], attributes[1].value[1], attributes[1].value[2] = 1, 1, cluster
    stream = torch.cuda.current_stream().cuda_stream
    config = Config(*grid, block, 1, 1, shared, stream, ctypes.addressof(attributes), 2 if cluster > 1 else 1)
    held = [ctypes.create_string_buffer(arg, len(arg)) for arg in args]
    pointers = (ctypes.c_void_p * len(args))(*[ctypes.addressof(arg) for arg in held])
    check_call(cuda.cuLaunchKernelEx(ctypes.byref(config), kernel, pointers, None), "launch")


def pointer(tensor):
    return struct.pack("<Q", 0 if tensor is None else tensor.data_ptr())


def ints(*values):
    return struct.pack(f"<{len(values)}i", *values)


class Case:
    """Sequences, each with tokens in front of the step (start) and in it (length), whose pages lie in any order."""

    def __init__(self, shape, rows, window=0, bf16=False, layers=1):
        torch.manual_seed(0)
        self.dim, self.shared, self.kv = shape
        self.rows, self.window, self.bf16 = rows, window, bf16
        self.query, self.tokens, self.scale = self.shared * self.kv, sum(length for _, length in rows), shape[0] ** -0.5
        dtype = torch.bfloat16 if bf16 else torch.float16
        needed = [-(-(start + length) // PAGE) for start, length in rows]
        self.tables = (torch.randperm(sum(needed)) + 1).split(needed)
        self.pages = [torch.randn(sum(needed) + 1, 2, self.kv, PAGE, self.dim, device="cuda").to(dtype) for _ in range(layers)]
        self.qkv = torch.randn(self.tokens, (self.query + 2 * self.kv) * self.dim, device="cuda")
        self.frequencies = (1e6 ** (-torch.arange(self.dim // 2).double() * 2 / self.dim)).float().cuda()
        places, firsts, lasts, starts, first, table = [], [], [], [], 0, self.tokens
        for (start, length), pages in zip(rows, self.tables):
            places += range(start, start + length)
            firsts += [first] * length
            lasts += [first + length - 1] * length
            starts += [table] * length
            first, table = first + length, table + len(pages)
        array = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
        self.places, self.firsts, self.lasts = array(places), array(firsts), array(lasts)
        self.table = torch.cat([array(starts), *[pages.int().cuda() for pages in self.tables]])
        self.tiles = max(places) // TILE + 1

    def alone(self):
        """The same tokens, each taken for a sequence of its own."""
        self.firsts = self.lasts = torch.arange(self.tokens, dtype=torch.int32, device="cuda")
        return self

    def step(self):
        arrays = [None, None, self.places, self.places, None, self.firsts, self.lasts, None, self.table]
        return b"".join(map(pointer, arrays)) + ints(self.tokens, self.tokens, 0, 0)

    def attention(self, stages, clusters=0, rope=False, tiles=0):
        turns = pointer(self.frequencies if rope else None) + ints(self.dim // 2 if rope else 0) + struct.pack("<f", 1)
        return (ints(self.query, self.kv, 0, self.window) + struct.pack("<f", self.scale) + ints(0, stages, clusters)
                + pointer(partials) + turns + pointer(None) + struct.pack("<f", 0) + ints(tiles))

    def row_bytes(self):
        plain = -(-self.dim // 16) * 32
        return plain if plain % 128 == 0 else plain + 16

    def singles(self, out, blocks=1, stages=2, merged=False, rope=False, layer=0, tiles=None):
        """`blocks` share a token's tiles: a cluster, or one for each tile and `merge_tiles` behind."""
        tiles, clusters = tiles or self.tiles, blocks > 1 and not merged
        bytes = (stages * 2 * TILE + 32) * self.row_bytes() + 4096
        if clusters:
            share = -(-self.shared * self.dim // (2 * blocks)) * 2
            bytes += self.shared * CLUSTER_TILES * 16 + -(-tiles // blocks) * blocks * share * 4
        of = lambda name: function("attention", name, self.dim, self.shared, self.bf16)
        shape = self.attention(stages, int(clusters), rope, blocks)
        args = [self.step(), shape, pointer(self.qkv), pointer(self.pages[layer]), pointer(out)]
        launch(of("attention"), (self.kv, self.tokens, blocks), 128, bytes, args, blocks if clusters else 1)
        if merged:
            launch(of("merge_tiles"), (self.query, self.tokens, 1), -(-self.dim // 32) * 32, 0, [args[0], args[1], args[4]])

    def many(self, out, stages=2, layer=0):
        kernel = function("attention_rows", "attention_rows", self.dim, self.shared, self.bf16)
        args = [self.step(), self.attention(stages), pointer(self.qkv), pointer(self.pages[layer]), pointer(out), ints(0)]
        blocks = -(-self.tokens // (BLOCK_ROWS // self.shared))
        launch(kernel, (self.kv, blocks, 1), 128, (stages * 2 * TILE + 2 * BLOCK_ROWS) * self.row_bytes(), args)

    def wgmma(self, out, layer=0):
        kernel = function("attention_wgmma", "attention_wgmma", self.dim, self.shared, self.bf16)
        args = [self.step(), self.attention(0), pointer(self.qkv), pointer(self.pages[layer]), pointer(out), ints(0)]
        blocks = -(-self.tokens // (2 * TILE // self.shared))
        launch(kernel, (self.kv, blocks, 1), 384, (RING[self.dim] * 2 * TILE + 4 * TILE) * self.row_bytes() + 3072, args)

    def out(self):
        return torch.full((self.tokens, self.query * self.dim), float("nan"), device="cuda")

    def wanted(self):
        results, first = [], 0
        for (start, length), table in zip(self.rows, self.tables):
            stored = self.pages[0][table.cuda()].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : start + length]
            keys, values = stored.repeat_interleave(self.shared, 1)
            queries = self.qkv[first : first + length, : self.query * self.dim].double().view(length, self.query, self.dim)
            scores = torch.einsum("lhd,hnd->hln", queries, keys) * self.scale
            at, own = torch.arange(start + length, device="cuda")[None], torch.arange(start, start + length, device="cuda")[:, None]
            hidden = (at > own) | (at <= own - self.window if self.window else False)
            weights = scores.masked_fill(hidden[None], -math.inf).softmax(-1)
            results.append(torch.einsum("hln,hnd->lhd", weights, values).reshape(length, -1))
            first += length
        return torch.cat(results)


def check():
    print("largest error of a row (mean square, relative), and whether each way has the bits of `attention_rows`")
    for shape, bf16 in [((128, 7, 4), False), ((64, 7, 2), False), ((20, 2, 1), False), ((256, 2, 1), False), ((128, 4, 2), True)]:
        for rows, window in [([(0, 100)], 0), ([(70, 150)], 0), ([(0, 300)], 90), ([(0, 5), (40, 1), (10, 30), (100, 64)], 0)]:
            case = Case(shape, rows, window, bf16)
            wanted, many = case.wanted(), case.out()
            case.many(many)
            ways = {"one block": {}, "cluster of 4": dict(blocks=4), "of 16": dict(blocks=16, stages=1), "merged": dict(blocks=case.tiles, merged=True)}
            same = []
            if RING[case.dim]:
                out = case.out()
                case.wgmma(out)
                torch.cuda.synchronize()
                same.append(f"wgmma {torch.equal(out.view(torch.int32), many.view(torch.int32))}")
            for name, how in ways.items():
                out = case.out()
                case.alone().singles(out, **how)
                torch.cuda.synchronize()
                same.append(f"{name} {torch.equal(out.view(torch.int32), many.view(torch.int32))}")
            error = (((many - wanted) ** 2).sum(-1) / (wanted**2).sum(-1)).max().item()
            print(f"{shape} {'bf16' if bf16 else 'f16'} {rows} window {window}: {error:.1e};", ", ".join(same))


def microseconds(body, count):
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / count


def decode():
    print("single tokens, fused with rotation and storing, 28 layers in a graph, us a layer")
    for name, shape in SHAPES.items():
        for streams, context in [(1, 256), (1, 1000), (1, 2000), (1, 8000), (16, 256), (64, 256), (256, 256), (256, 1000)]:
            layers = 28 if streams == 1 else 4
            case = Case(shape, [(context - 1, 1)] * streams, layers=layers)
            out, room = case.out(), max(512, 1 << (context - 1).bit_length()) // TILE
            ways = {"one block": {}, "one stage": dict(stages=1)}
            if room <= CLUSTER_TILES:
                ways |= {f"cluster of {n}": dict(blocks=n, stages=2 if room > n else 1) for n in (4, 8, 16)}
            if streams == 1:
                ways["merged"] = dict(blocks=room, merged=True, stages=1)
            times = []
            for way, how in ways.items():
                body = lambda: [case.singles(out, rope=True, layer=layer, tiles=room, **how) for layer in range(layers)]
                times.append(f"{way} {microseconds(body, layers):.2f}")
            bytes = streams * context * case.kv * case.dim * 4
            print(f"{name} {streams} x {context}:", ", ".join(times), f"(at 4.2 TB/s {bytes / 4.2e6:.1f})")


def prompt():
    print("prompts, us and TFLOP/s of what causal attention needs")
    for name, shape in SHAPES.items():
        for tokens in (128, 256, 512, 1024, 2048, 8192):
            case = Case(shape, [(0, tokens)])
            out = case.out()
            needed = 2 * case.dim * case.query * tokens * (tokens + 1)
            times = [microseconds(body, 1) for body in (lambda: case.many(out), lambda: case.wgmma(out))]
            print(f"{name} {tokens}:", ", ".join(f"{us:.1f} ({needed / us / 1e6:.0f})" for us in times), "by mma.sync and wgmma")


if __name__ == "__main__":
    for part in sys.argv[1:] or ["check", "decode", "prompt"]:
        {"check": check, "decode": decode, "prompt": prompt}[part]()
