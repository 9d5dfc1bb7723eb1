"""Train a small language model on bytes of real text, then serve many requests with a paged KV cache.

    python examples/generate.py                       # train a little, serve, and compare tokens a second with SDPA
    python examples/generate.py --requests 256 --slots 64 --room 8192
    python examples/generate.py --data my.txt --steps 1000 --show 3

Requests wait in a queue. Each gets a slot and pages as soon as they are free, and its prompt is prefilled in chunks.
All slots generate together: a replay of one CUDA graph adds a token to each, whatever their lengths are. The pages of
a finished request go to the next one. All tokens are compared with those that the model gives for the whole sequence
with naive attention. Last, drafted trees of tokens are verified in one call each. Without a GPU the kernels run in
Triton's interpreter, which is slow, so sizes are tiny there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from decoder import DTYPES, ROOT, Attend, Decoder, Variant, naive, sdpa, stop
from tiny_lm import read_text, train
from torch.nn import functional as F

SIZES = {  # the defaults of options, by device
    "cuda": {"layers": 8, "d_model": 1024, "heads": 16, "steps": 200, "seq": 512, "batch": 16,
             "slots": 32, "room": 4096, "requests": 96, "prompt": 3000, "new": 512, "chunk": 512},
    "cpu": {"layers": 1, "d_model": 64, "heads": 4, "steps": 2, "seq": 32, "batch": 2,
            "slots": 2, "room": 192, "requests": 3, "prompt": 80, "new": 4, "chunk": 48},
}  # fmt: skip
HELP = {
    "slots": "sequences that generate together", "room": "tokens of a sequence, at most",
    "prompt": "tokens of a prompt, at most", "new": "tokens of an answer, at most",
    "chunk": "tokens of a prompt that are read at a time",
}  # fmt: skip
PAGE, DIM = 64, 128  # page size and head_dim, as in specs/decode_paged_gqa.yaml
WIDTH, DEPTH = 2, 3  # of a drafted tree: guesses after each token, and tokens after the last known one
CLOSE = 0.1  # how far rounding may put the logit of a token below the largest one
TREE = f"""
name: drafted_gqa
heads: {{sharing: gqa}}
head_dim: {DIM}
mask: tree
cache: {{paged: {{page_size: {PAGE}}}}}
backward: false
"""


class Pages:
    """Keys and values of all layers in pages, and a page table for each slot. Slots without a request use page 0.

    attend: the module's `attention.with_kvcache`; verify: the same of a module whose mask is a tree of new tokens.
    """

    title = "attngen, pages of 64"

    def __init__(
        self, attend: Callable[..., Any], verify: Callable[..., Any], like: torch.Tensor, args: argparse.Namespace
    ) -> None:
        self.attend, self.verify, self.pages_per_slot = attend, verify, args.room // PAGE
        # Half of the pages that all slots could fill, so that requests also wait for pages.
        count = 1 + max(self.pages_per_slot, args.slots * self.pages_per_slot // 2)
        shape = (args.layers, count, PAGE, args.heads // 4, DIM)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.table = torch.zeros(args.slots, self.pages_per_slot, dtype=torch.int32, device=like.device)
        self.free = list(range(1, count))
        self.pages_of: dict[int, list[int]] = {}

    def allocate(self, slot: int, tokens: int) -> bool:
        """Give a slot pages for `tokens` tokens, if enough are free."""
        count = -(-tokens // PAGE)
        if count > len(self.free):
            return False
        self.pages_of[slot], self.free = self.free[:count], self.free[count:]
        self.table[slot, :count] = torch.tensor(self.pages_of[slot], dtype=torch.int32)
        return True

    def release(self, slot: int) -> None:
        """Free the pages of a slot."""
        self.free += self.pages_of.pop(slot)
        self.table[slot] = 0

    def attention(self, layer: int, slots: slice, lengths: torch.Tensor, stop: int, **tree: torch.Tensor) -> Attend:
        """Attention of new tokens to the cache of some slots, to which it first appends their keys and values."""
        fixed = {"cache_seqlens": lengths, "page_table": self.table[slots], **tree}
        attend = self.verify if tree else self.attend
        return lambda q, k, v: attend(q, self.keys[layer], self.values[layer], k=k, v=v, **fixed)

    def move(self, slot: int, rows: torch.Tensor, to: int) -> None:
        """Move rows of a slot to consecutive rows from `to` on."""
        places = torch.arange(to, to + len(rows), device=rows.device)
        pages, target = self.table[slot].long(), self.table[slot].long()[places // PAGE]
        for x in (self.keys, self.values):
            x[:, target, places % PAGE] = x[:, pages[rows // PAGE], rows % PAGE]


class Rows:
    """The same with SDPA: contiguous rows for the longest sequence in each slot, and a mask of those in use."""

    title = "SDPA, contiguous"

    def __init__(self, like: torch.Tensor, args: argparse.Namespace) -> None:
        shape = (args.layers, args.slots, args.heads // 4, args.room, DIM)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    def allocate(self, slot: int, tokens: int) -> bool:
        return True

    def release(self, slot: int) -> None:
        pass

    def attention(self, layer: int, slots: slice, lengths: torch.Tensor, stop: int) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            rows = lengths[:, None].long() + torch.arange(q.shape[2], device=q.device)
            seen = torch.arange(stop, device=q.device) <= rows[:, :, None]
            keys, values = self.keys[layer, slots], self.values[layer, slots]
            for stored, x in ((keys, k), (values, v)):
                stored.scatter_(2, rows[:, None, :, None].expand(x.shape), x)
            return F.scaled_dot_product_attention(
                q, keys[:, :, :stop], values[:, :, :stop], seen[:, None], enable_gqa=True
            )

        return attend


@dataclass
class Request:
    """A prompt, the number of tokens to generate after it, and in the end all tokens."""

    prompt: torch.Tensor
    new: int
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class Server:
    """A model, its cache, and the slots whose sequences generate together. The host waits for the device only at the
    end of a request."""

    def __init__(self, model: Decoder, cache: Pages | Rows, args: argparse.Namespace) -> None:
        self.model, self.cache, self.args = model, cache, args
        self.device = model.head.weight.device
        self.lengths = torch.zeros(args.slots, dtype=torch.int32, device=self.device)
        self.active = torch.zeros_like(self.lengths)  # 1 where a slot has a request
        # The tokens of each slot.
        self.known = torch.zeros(args.slots, args.room + 1, dtype=torch.long, device=self.device)
        self.requests: dict[int, tuple[Request, int]] = {}  # by slot, with the number of tokens left to generate
        self.graph: torch.cuda.CUDAGraph | None = None

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: slice, lengths: torch.Tensor, stop: int, **tree: Any
    ) -> torch.Tensor:
        """Logits of the next token after each of the new tokens [B, new] at `positions` of their sequences."""
        x = self.model.embed(tokens) + self.model.position(positions)
        for layer, block in enumerate(self.model.blocks):
            x = block(x, self.cache.attention(layer, slots, lengths, stop, **tree))
        return self.model.head(self.model.norm(x))

    def prefill(self, slot: int, prompt: torch.Tensor) -> torch.Tensor:
        """Read a prompt in chunks, and return the next token."""
        for start in range(0, len(prompt), self.args.chunk):
            chunk = prompt[None, start : start + self.args.chunk]
            positions = torch.arange(start, start + chunk.shape[1], device=self.device)
            begun = torch.full((1,), start, dtype=torch.int32, device=self.device)
            found = self.logits(chunk, positions, slice(slot, slot + 1), begun, start + chunk.shape[1])
        return found[0, -1].argmax()

    def admit(self, slot: int, request: Request) -> bool:
        """Start a request, if the cache has room for it."""
        prompt = request.prompt.to(self.device)
        if not self.cache.allocate(slot, len(prompt) + request.new):
            return False
        self.known[slot, : len(prompt)] = prompt
        self.known[slot, len(prompt)] = self.prefill(slot, prompt)
        self.lengths[slot], self.active[slot] = len(prompt), 1
        self.requests[slot] = request, request.new - 1
        return True

    def step(self) -> None:
        """Generate a token for each slot; tokens of slots without a request are not stored."""
        at = self.lengths[:, None].long()
        found = self.logits(self.known.gather(1, at), at, slice(None), self.lengths, self.args.room)
        self.known.scatter_(
            1, at + 1, torch.where(self.active[:, None] > 0, found.argmax(-1), self.known.gather(1, at + 1))
        )
        self.lengths += self.active

    def captured(self) -> Callable[[], None]:
        """`step` as a replay of a CUDA graph, captured while no slot has a request; `step` itself without a GPU."""
        if self.device.type != "cuda":
            return self.step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
        return self.graph.replay

    def serve(self, requests: list[Request], step: Callable[[], None]) -> None:
        """Continuous batching: requests start and end between steps, each as early as possible."""
        waiting = list(requests)
        while waiting or self.requests:
            for slot in range(self.args.slots):
                if waiting and slot not in self.requests and self.admit(slot, waiting[0]):
                    del waiting[0]
            steps = min(left for _, left in self.requests.values())
            for _ in range(steps):
                step()
            self.requests = {slot: (request, left - steps) for slot, (request, left) in self.requests.items()}
            for slot in [slot for slot, (_, left) in self.requests.items() if not left]:
                request, _ = self.requests.pop(slot)
                request.tokens = self.known[slot, : len(request.prompt) + request.new].clone()
                self.lengths[slot] = self.active[slot] = 0
                self.cache.release(slot)


class Drafts:
    """Trees of guesses, DEPTH tokens ahead: after each token the WIDTH tokens that follow it most often in the text."""

    def __init__(self, text: torch.Tensor, device: torch.device) -> None:
        pairs = torch.zeros(256 * 256).index_add_(
            0, text[:-1].long() * 256 + text[1:].long(), torch.ones(len(text) - 1)
        )
        self.follows = pairs.view(256, 256).topk(WIDTH, 1).indices.tolist()
        self.parents = [-1] + [parent for parent in range(sum(WIDTH**d for d in range(DEPTH))) for _ in range(WIDTH)]
        count = len(self.parents)
        sees = torch.eye(count, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            sees[node] |= sees[parent]
        # A node sees itself and its ancestors.
        self.sees, self.depths = sees[None].to(device), (sees.sum(1) - 1).to(device)

    def tokens(self, last: int) -> list[int]:
        """The tokens of the tree whose root is the token `last`."""
        found = [last]
        for node, parent in enumerate(self.parents[1:], 1):
            found.append(self.follows[found[parent]][(node - 1) % WIDTH])
        return found

    def path(self, tokens: list[int], said: list[int]) -> list[int]:
        """The nodes, from the root on, whose tokens the model itself gives (`said`), each a child of the one before."""
        nodes = [0]
        while True:
            children = (
                n for n, parent in enumerate(self.parents) if parent == nodes[-1] and tokens[n] == said[nodes[-1]]
            )
            child = next(children, None)
            if child is None:
                return nodes
            nodes.append(child)


def draft(server: Server, drafts: Drafts, request: Request) -> tuple[torch.Tensor, int]:
    """The tokens of a request and the number of calls; each call verifies a tree and keeps the model's own tokens."""
    cache: Any = server.cache
    prompt = request.prompt.to(server.device)
    cache.allocate(0, len(prompt) + request.new + len(drafts.parents))
    found, length, calls = [int(server.prefill(0, prompt))], len(prompt), 0
    while len(found) < request.new:
        tokens = drafts.tokens(found[-1])
        lengths = torch.full((1,), length, dtype=torch.int32, device=server.device)
        nodes = torch.tensor([tokens], device=server.device)
        said = server.logits(
            nodes, length + drafts.depths, slice(0, 1), lengths, length + len(tokens), tree_mask=drafts.sees
        )[0]
        answers = said.argmax(-1).tolist()
        path = drafts.path(tokens, answers)
        cache.move(0, length + torch.tensor(path, device=server.device), length)
        found += [answers[node] for node in path]
        length, calls = length + len(path), calls + 1
    cache.release(0)
    return torch.cat([prompt, torch.tensor(found[: request.new], device=server.device)]), calls


def compare(model: Decoder, requests: list[Request]) -> tuple[int, int, float]:
    """The number of tokens, how many of them the model gives for the whole sequence with naive attention, and by how
    much the logits of the others are below the largest."""
    total = same = 0
    worst = 0.0
    for request in requests:
        logits = model(request.tokens[None, :-1], naive)[0, len(request.prompt) - 1 :].float()
        answer = request.tokens[len(request.prompt) :]
        gap = (logits.max(-1).values - logits.gather(1, answer[:, None])[:, 0]).nan_to_num(torch.inf)
        total, same, worst = total + len(answer), same + int((gap == 0).sum()), max(worst, float(gap.max()))
    return total, same, worst


def agreement_text(total: int, same: int, worst: float) -> str:
    """The result of `compare` as text."""
    rest = f", the others at most {worst:.3f} below in their logit" if same < total else ""
    return f"{same:,} of {total:,} are those of the whole sequence{rest}"


def built(spec: str, folder: Path) -> Any:
    """Build the module of a spec, and import it."""
    path = folder / "spec.yaml"
    path.write_text(spec)
    command = [sys.executable, "-m", "attngen", "build", str(path), "--out", str(folder)]
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    sys.path.insert(0, str(folder))
    return importlib.import_module("drafted_gqa")


def rate_text(title: str, requests: list[Request], seconds: float) -> str:
    """Tokens a second as text."""
    made, read = sum(r.new for r in requests), sum(len(r.prompt) for r in requests)
    return f"{title:<24} {made / seconds:10,.0f} tokens/s generated, {read:,} read before, {seconds:.2f} s"


def seconds_to_serve(server: Server, requests: list[Request]) -> float:
    """Seconds in which a server answers requests, after its step is captured and its kernels are compiled."""
    step = server.captured()
    server.serve([Request(request.prompt, 1) for request in requests[: server.args.slots]], step)
    wait = torch.cuda.synchronize if server.device.type == "cuda" else (lambda: None)
    wait()
    started = time.perf_counter()
    server.serve(requests, step)
    wait()
    return time.perf_counter() - started


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        type=Path,
        help="file to train on and to ask about, as bytes [the sources of Python's standard library]",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--show", type=int, default=1, help="answers that are printed [1]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-4)
    for name, cuda in SIZES["cuda"].items():
        shown = f"[{cuda}; on a CPU {SIZES['cpu'][name]}]"
        parser.add_argument(
            f"--{name}".replace("_", "-"), type=int, help=f"{HELP[name]} {shown}" if name in HELP else shown
        )
    args = parser.parse_args(argv)
    for name, default in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 1 or more")
    if args.room % PAGE:
        parser.error(f"--room {args.room}: expected a multiple of {PAGE}, the tokens of a page")
    if args.heads % 4:
        parser.error(f"--heads {args.heads}: expected a multiple of 4, which share a K/V head")
    if args.prompt + args.new > args.room:
        parser.error(f"--prompt {args.prompt} --new {args.new}: expected at most --room, {args.room}, together")
    args.dtype, args.every = "bf16" if args.device == "cuda" else "fp32", max(1, args.steps // 4)
    return args


@torch.no_grad()
def serve_and_compare(args: argparse.Namespace, model: Decoder, text: torch.Tensor, folder: Path) -> None:
    """Serve the same requests with pages and with SDPA, compare their tokens with the whole sequence, verify drafts."""
    served = importlib.import_module("generated.decode_paged_gqa").attention.with_kvcache
    like = model.head.weight
    generator = torch.Generator().manual_seed(args.seed)

    def random_request() -> Request:
        length = int(torch.randint(1, args.prompt + 1, (1,), generator=generator))
        start = int(torch.randint(0, len(text) - length, (1,), generator=generator))
        return Request(
            text[start : start + length].long(), int(torch.randint(1, args.new + 1, (1,), generator=generator))
        )

    requests = [random_request() for _ in range(args.requests)]
    pages = Pages(served, built(TREE, folder).attention.with_kvcache, like, args)
    for cache in (pages, Rows(like, args)):
        asked = [Request(r.prompt, r.new) for r in requests]
        seconds = seconds_to_serve(Server(model, cache, args), asked)
        total, same, worst = compare(model, asked)
        print(rate_text(cache.title, asked, seconds), flush=True)
        print(f"{'':<24} {agreement_text(total, same, worst)}", flush=True)
        if not worst <= CLOSE:
            stop(f"{cache.title}: a token is {worst:.3f} below the best one; expected at most {CLOSE}")
        if cache is pages:
            for request in asked[: args.show]:
                print(
                    "   ",
                    bytes(request.tokens[-request.new :].tolist()).decode("utf-8", "replace").replace("\n", "\n    "),
                    flush=True,
                )
    one = Request(requests[0].prompt[: args.room // 2], min(args.new, args.room // 4))
    one.tokens, calls = draft(Server(model, pages, args), Drafts(text, like.device), one)
    total, same, worst = compare(model, [one])
    print(f"{'drafted trees':<24} {total} tokens by {calls} calls; {agreement_text(total, same, worst)}")
    if not worst <= CLOSE:
        stop(f"drafted trees: a token is {worst:.3f} below the best one; expected at most {CLOSE}")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the generated module imports Triton
    sys.path.insert(0, str(ROOT))
    text = read_text(args.data)
    if len(text) <= max(args.seq, args.prompt):
        stop(f"--data {args.data}: {len(text)} bytes; expected more than --seq {args.seq} and --prompt {args.prompt}")
    torch.manual_seed(args.seed)
    chosen = Variant("sdpa", sdpa, args.heads // 4, DIM, DIM)
    model = Decoder(args.layers, args.d_model, args.heads, args.room + 1, chosen).to(args.device)
    train(model, sdpa, text, args, "training")
    model = model.to(DTYPES["bf16" if args.device == "cuda" else "fp16"]).eval()
    with tempfile.TemporaryDirectory() as folder:
        serve_and_compare(args, model, text, Path(folder))


if __name__ == "__main__":
    main()
