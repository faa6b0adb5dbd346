#!/usr/bin/env python3
"""Train a small language model like models/kvq-demo-q8_0.gguf from a folder of text, and write it as GGUF.

    python scripts/train_demo_model.py --text ~/texts --out demo --minutes 5          (one GPU; the demo took 300 s on
    an H200) python scripts/train_demo_model.py --text ~/texts --out tiny --size tiny --steps 20 --device cpu
    (does it run?)

Needs torch, tokenizers, gguf and this package. The demo: 79.5 M tokens of documentation and source code, a quarter of
the sequences replaced by the retrieval tasks of ggml_kvq.evaluate.tasks, so that a model of 11 M parameters can look
things up in 4096 tokens. Steps: byte-level BPE; a llama of --size; Muon (Jordan et al. 2024) for matrices and AdamW
for the rest, warm-up, constant rate, linear decay; answers weighted up, task contexts down; export with llama.cpp's
order of Q and K rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from ggml_kvq.evaluate import tasks

# d: width, n_layer, n_head, n_kv: KV heads, head: head size, ffn: hidden width of the feed-forward block
SIZES = {
    "tiny": {"d": 64, "n_layer": 2, "n_head": 4, "n_kv": 2, "head": 16, "ffn": 128},
    "demo": {"d": 256, "n_layer": 12, "n_head": 4, "n_kv": 2, "head": 64, "ffn": 704},
    "eval": {"d": 512, "n_layer": 16, "n_head": 8, "n_kv": 4, "head": 64, "ffn": 1216},
}
ROPE_BASE, NORM_EPS = 10000.0, 1e-5
BOS, EOS, PAD = 0, 1, 2
SUFFIXES = {".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".html", ".tex"}
# loss weight of the text around the facts: nearly random in list-like tasks, readable in the others
CONTEXT_WEIGHT = {
    "passkey": 0.5,
    "multineedle": 0.5,
    "vartrack": 0.4,
    "count": 0.4,
    "lines": 0.1,
    "kv": 0.05,
    "copy": 0.1,
    "fewshot": 0.1,
}
CHARS_PER_TOKEN = {
    "lines": 2.65,
    "passkey": 3.2,
    "multineedle": 3.1,
    "kv": 1.85,
    "copy": 2.9,
    "vartrack": 3.0,
    "fewshot": 2.9,
    "count": 3.1,
}


# ------------------------------------------------------------------ text


def read_texts(folder: Path, heldout_share: float) -> tuple[list[str], list[str]]:
    """(training documents, held-out documents): text files without duplicates, split by file stem so that twins
    stay together.
    """
    seen: set[bytes] = set()
    train: list[str] = []
    held: list[str] = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()):
        text = path.read_text(encoding="utf-8", errors="ignore").strip()
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 200 or digest in seen:
            continue
        seen.add(digest)
        share = int.from_bytes(hashlib.sha256(path.stem.encode()).digest()[:4], "little") / 2**32
        (held if share < heldout_share else train).append(text)
    if not train or not held:
        raise SystemExit(
            f"{folder} gives {len(train)} training and {len(held)} held-out texts; add more files"
            f" ({' '.join(sorted(SUFFIXES))})"
        )
    return train, held


def make_tokenizer(documents: list[str], n_vocab: int) -> Any:
    """Byte-level BPE with GPT-2's splitting, which llama.cpp knows as pre-tokenizer "gpt-2"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Any, documents: list[str]) -> np.ndarray:
    """uint16 tokens of all documents, each between BOS and EOS."""
    parts = [np.array([BOS, *e.ids, EOS], np.uint16) for e in tokenizer.encode_batch(documents)]
    return np.concatenate(parts)


# ------------------------------------------------------------------ batches


class Batches:
    """Sequences of n_ctx + 1 tokens with loss weights: windows of the text, a share of them replaced by retrieval
    tasks.
    """

    def __init__(self, tokenizer: Any, tokens: np.ndarray, text: str, n_ctx: int, task_share: float, seed: int) -> None:
        self.tokenizer, self.tokens, self.n_ctx, self.task_share = tokenizer, tokens, n_ctx, task_share
        self.filler = tasks.text_filler(text)
        self.rng = random.Random(seed)

    def window(self) -> tuple[np.ndarray, np.ndarray]:
        at = self.rng.randrange(max(1, len(self.tokens) - self.n_ctx))
        ids = np.full(self.n_ctx + 1, PAD, np.int64)
        part = self.tokens[at : at + self.n_ctx]
        ids[0], ids[1 : 1 + len(part)] = BOS, part
        return ids, (ids != PAD).astype(np.float32)

    def task(self, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """Task contexts until the sequence is full; short ones first (progress 0..1), so that copying is learnt
        before searching.
        """
        ids, weights = [BOS], [0.0]
        while (room := self.n_ctx + 1 - len(ids)) >= 150:
            longest = 800 if progress < 0.08 else room
            length = min(room, math.exp(self.rng.uniform(math.log(120), math.log(max(160, longest)))))
            task = self.rng.choice(list(CHARS_PER_TOKEN))  # tasks that came later are not in the recipe
            n_questions = self.rng.randint(1, max(1, min(10, int(length / 120))))
            n_chars = int(max(50.0, length - 30 * n_questions) * CHARS_PER_TOKEN[task])
            part_ids, part_weights = self._segments(task, max(150, n_chars), n_questions)
            if len(part_ids) >= room:
                break
            ids += [*part_ids, BOS]
            weights += [*part_weights, 0.0]
        rest = self.n_ctx + 1 - len(ids)
        if rest > 0:
            more = self.tokenizer.encode(self.filler(self.rng, rest * 5 + 200)).ids[:rest]
            ids += more + [PAD] * (rest - len(more))
            weights += [1.0] * len(more) + [0.0] * (rest - len(more))
        return np.array(ids[: self.n_ctx + 1]), np.array(weights[: self.n_ctx + 1], np.float32)

    def _segments(self, task: str, n_chars: int, n_questions: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        pending = ""
        for text, is_answer in tasks.segments(task, n_chars, self.rng, self.filler, n_questions):
            if not is_answer:
                pending += text
                continue
            for part, weight in ((pending, CONTEXT_WEIGHT[task]), (text, 2.5 if task == "copy" else 6.0)):
                new = self.tokenizer.encode(part).ids
                ids += new
                weights += [weight] * len(new)
            pending = ""
        return ids, weights

    def batch(self, n: int, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int64 [n, n_ctx + 1], weights float32 of the same shape)."""
        rows = [self.task(progress) if self.rng.random() < self.task_share else self.window() for _ in range(n)]
        return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


# ------------------------------------------------------------------ model and training (torch)


def build(torch: Any, c: dict[str, int], n_vocab: int, n_ctx: int) -> Any:
    """A llama: RMS norm, grouped-query attention with NEOX-style rotary embedding, SwiGLU, tied output."""
    nn, functional = torch.nn, torch.nn.functional

    def norm(x: Any, weight: Any) -> Any:
        f = x.float()
        return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + NORM_EPS) * weight).to(x.dtype)

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    class Block(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.attn_q = nn.Linear(c["d"], c["n_head"] * c["head"], bias=False)
            self.attn_k = nn.Linear(c["d"], c["n_kv"] * c["head"], bias=False)
            self.attn_v = nn.Linear(c["d"], c["n_kv"] * c["head"], bias=False)
            self.attn_output = nn.Linear(c["n_head"] * c["head"], c["d"], bias=False)
            self.ffn_gate = nn.Linear(c["d"], c["ffn"], bias=False)
            self.ffn_up = nn.Linear(c["d"], c["ffn"], bias=False)
            self.ffn_down = nn.Linear(c["ffn"], c["d"], bias=False)
            self.attn_norm = nn.Parameter(torch.ones(c["d"]))
            self.ffn_norm = nn.Parameter(torch.ones(c["d"]))

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            n, t, _ = x.shape
            h = norm(x, self.attn_norm)
            q, k, v = (w(h).view(n, t, -1, c["head"]).transpose(1, 2) for w in (self.attn_q, self.attn_k, self.attn_v))
            groups = c["n_head"] // c["n_kv"]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, -1)
            x = x + self.attn_output(o)
            h = norm(x, self.ffn_norm)
            return x + self.ffn_down(functional.silu(self.ffn_gate(h)) * self.ffn_up(h))

    class Llama(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.token_embd = nn.Embedding(n_vocab, c["d"])
            self.blk = nn.ModuleList([Block() for _ in range(c["n_layer"])])
            self.output_norm = nn.Parameter(torch.ones(c["d"]))
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    deep = name.endswith(("attn_output.weight", "ffn_down.weight"))
                    nn.init.normal_(p, 0, 0.02 / (math.sqrt(2 * c["n_layer"]) if deep else 1))
            inverse = ROPE_BASE ** (-torch.arange(0, c["head"], 2).double() / c["head"])
            angle = torch.outer(torch.arange(n_ctx).double(), inverse)
            self.register_buffer("cos", angle.cos().float(), persistent=False)
            self.register_buffer("sin", angle.sin().float(), persistent=False)

        def forward(self, ids: Any) -> Any:
            x = self.token_embd(ids)
            for block in self.blk:
                x = block(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
            return functional.linear(norm(x, self.output_norm), self.token_embd.weight)

    return Llama()


def muon_step(torch: Any, matrices: list[Any], momenta: list[Any], rate: float, momentum: float, decay: float) -> None:
    """One Muon update: the momentum's nearest semi-orthogonal matrix, by five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    for p, m in zip(matrices, momenta, strict=True):
        m.lerp_(p.grad, 1 - momentum)
        x = p.grad.lerp(m, momentum).bfloat16()
        tall = x.size(0) > x.size(1)
        x = x.mT if tall else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            y = x @ x.mT
            x = a * x + (b * y + c * y @ y) @ x
        x = x.mT if tall else x
        p.mul_(1 - rate * decay).add_(x.float(), alpha=-rate * 0.2 * math.sqrt(max(p.shape)))


def train(
    args: argparse.Namespace, tokenizer: Any, tokens: np.ndarray, text: str, heldout: np.ndarray, n_vocab: int
) -> dict[str, np.ndarray]:
    """Train until --minutes or --steps are over; returns the weights by name."""
    import torch

    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    model = build(torch, SIZES[args.size], n_vocab, args.n_ctx).to(device)
    if args.compile:
        for block in model.blk:
            block.compile(dynamic=False)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and n != "token_embd.weight"]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or n == "token_embd.weight"]
    momenta = [torch.zeros_like(p) for p in matrices]
    adam = torch.optim.AdamW(others, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    data = Batches(tokenizer, tokens, text, args.n_ctx, args.task_share, args.seed)
    mixed = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(tokens) / 1e6:.1f} M tokens of text"
    )

    def loss_of(ids: np.ndarray, weights: np.ndarray) -> Any:
        x = torch.from_numpy(ids).to(device)
        w = torch.from_numpy(weights[:, 1:].copy()).to(device)
        with mixed:
            logits = model(x[:, :-1])
        nll = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        return (nll * w.flatten()).sum() / w.sum().clamp_min(1.0)

    start, step = time.monotonic(), 0
    while True:
        progress = step / args.steps if args.steps else (time.monotonic() - start) / (60 * args.minutes)
        if progress >= 1:
            break
        shape = min(1.0, (step + 1) / 100) * (1.0 if progress < 0.5 else max(0.02, (1 - progress) / 0.5))
        for _ in range(args.accumulate):
            loss = loss_of(*data.batch(args.batch, progress))
            (loss / args.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for group in adam.param_groups:
            group["lr"] = args.rate * shape
        adam.step()
        with torch.no_grad():
            muon_step(torch, matrices, momenta, args.rate * shape, min(0.95, 0.85 + step / 3000), 0.1)
        for p in model.parameters():
            p.grad = None
        step += 1
        if step == 1 or step % 50 == 0:
            print(f"step {step}  {100 * progress:.0f} %  loss {loss.item():.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        n = max(1, min(16, len(heldout) // args.n_ctx))
        losses = []
        for i in range(n):
            part = heldout[i * args.n_ctx : (i + 1) * args.n_ctx].astype(np.int64)
            ids = np.concatenate([[BOS], part])[None]
            losses.append(loss_of(ids, np.ones(ids.shape, np.float32)).item())
    print(f"{step} steps, held-out loss {np.mean(losses):.3f} nats over {n} windows of {args.n_ctx}")
    return {name: p.detach().float().cpu().numpy() for name, p in model.state_dict().items()}


# ------------------------------------------------------------------ GGUF


def to_llama_rows(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of Q or K from half-split rotary order to llama.cpp's interleaved one."""
    return weight.reshape(n_head, 2, weight.shape[0] // n_head // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def export(
    path: Path,
    weights: dict[str, np.ndarray],
    c: dict[str, int],
    n_ctx: int,
    tokenizer: Any,
    n_vocab: int,
    quantize: bool,
) -> None:
    """Write GGUF: matrices in q8_0 or f16, norms in f32, tokenizer inside."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0 if quantize else gguf.GGMLQuantizationType.F16
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(path.stem)
    w.add_description("small decoder trained from scratch to try and test KV-cache compression")
    w.add_context_length(n_ctx)
    w.add_embedding_length(c["d"])
    w.add_block_count(c["n_layer"])
    w.add_feed_forward_length(c["ffn"])
    w.add_head_count(c["n_head"])
    w.add_head_count_kv(c["n_kv"])
    w.add_layer_norm_rms_eps(NORM_EPS)
    w.add_rope_freq_base(ROPE_BASE)
    w.add_rope_dimension_count(c["head"])
    w.add_key_length(c["head"])
    w.add_value_length(c["head"])
    w.add_vocab_size(n_vocab)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantize else gguf.LlamaFileType.MOSTLY_F16)
    w.add_quantization_version(2)
    bpe = json.loads(tokenizer.to_str())["model"]
    names = {i: t for t, i in bpe["vocab"].items()}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([names.get(i, f"<unused{i}>") for i in range(n_vocab)])
    special, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    w.add_token_types([special if i < 3 else normal if i in names else unused for i in range(n_vocab)])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in bpe["merges"]])
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_pad_token_id(PAD)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    # a base model: a chat simply continues the text
    w.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, x in weights.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            x = to_llama_rows(x, c["n_head"] if "attn_q" in name else c["n_kv"])
        full = name if name.endswith(".weight") else f"{name}.weight"
        if x.ndim == 1:
            w.add_tensor(full, np.ascontiguousarray(x, np.float32))
        else:
            w.add_tensor(full, gguf.quants.quantize(np.ascontiguousarray(x, np.float32), kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", type=Path, required=True, help=f"folder of text files ({' '.join(sorted(SUFFIXES))})")
    p.add_argument(
        "--out",
        type=Path,
        required=True,
        help="path of the model without suffix: writes OUT-q8_0.gguf and OUT-f16.gguf",
    )
    p.add_argument("--size", choices=SIZES, default="demo")
    p.add_argument("--n-ctx", type=int, default=4096, help="sequence length in tokens")
    p.add_argument("--vocab", type=int, default=8192, help="vocabulary, a multiple of 32, below 65536")
    p.add_argument("--minutes", type=float, default=5.0, help="training time (the schedule follows it)")
    p.add_argument("--steps", type=int, default=0, help="so many steps instead of --minutes")
    p.add_argument("--batch", type=int, default=16, help="sequences at once")
    p.add_argument("--accumulate", type=int, default=2, help="batches a step; the demo took 131k tokens a step")
    p.add_argument("--rate", type=float, default=3e-3, help="learning rate at its peak")
    p.add_argument("--task-share", type=float, default=0.25, help="share of the sequences made of retrieval tasks")
    p.add_argument("--heldout", type=float, default=0.01, help="share of the files that is never trained on")
    p.add_argument("--device", default="cuda")
    p.add_argument("--compile", action="store_true", help="compile the blocks (faster after a minute)")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()

    documents, held = read_texts(args.text, args.heldout)
    tokenizer = make_tokenizer(documents, args.vocab)
    weights = train(
        args,
        tokenizer,
        encode(tokenizer, documents),
        "\n\n".join(documents) + "\n",
        encode(tokenizer, held),
        args.vocab,
    )
    for kind, quantize in (("q8_0", True), ("f16", False)):
        path = args.out.with_name(f"{args.out.name}-{kind}.gguf")
        export(path, weights, SIZES[args.size], args.n_ctx, tokenizer, args.vocab, quantize)
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
