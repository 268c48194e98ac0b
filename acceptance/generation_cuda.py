"""Generation on a GPU: tokens/s of tapeless and of transformers in one run, and a row's bits in any company.

    python acceptance/generation_cuda.py                 the claims
    … --cases llama-124m:1 --no-transformers             some of them, tapeless alone
    python acceptance/generation_cuda.py --profile       a step's time, and by kernel
    python acceptance/generation_cuda.py --tune          other tiles for the linear maps, attention and sampler, one at a time
It needs torch, triton, numpy and safetensors, and transformers to compare with: PYTHONPATH=src. Weights are initial values:
what they are does not change the time."""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from claim import Claims, skip

import tapeless
from tapeless.bench.kernel_profile import spent_by_kind
from tapeless.config import ModelConfig, Sampling
from tapeless.generate.device_decoder import DeviceDecoder
from tapeless.generate.engine import Engine, generate_each
from tapeless.generate.sampler import sample, uniform
from tapeless.model.transformer import Transformer
from tapeless.ops.op import SlotState

PROMPT, NEW = 16, 256  # tokens
ROUNDS = 3
SAMPLINGS = {"greedy": Sampling(temperature=0.0), "top-k 40": Sampling(temperature=0.8, top_k=40)}
COMPANY = [(1, 3), (2, 60), (5, 520), (64, 37), (17, 300)]  # rows beside a row, and how long its sequence is


class Case(NamedTuple):
    preset: str
    sequences: int
    bound: int  # tokens/s


CASES = [Case("llama-124m", 1, 2000), Case("llama-124m", 8, 14000), Case("llama-124m", 64, 60000), Case("llama-1b", 1, 1000)]


def config_of(preset: str) -> ModelConfig:
    config = tapeless.load_preset(preset)
    assert isinstance(config, ModelConfig)
    return config


def on_gpu(config: ModelConfig, dtype: str = "bfloat16") -> Transformer:
    return Transformer(config, device="cuda", dtype=dtype)


def prompts(sequences: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(50000, (sequences, PROMPT), generator=generator).tolist()


def tokens_per_s(run: Callable[[], int], rounds: int = ROUNDS) -> float:
    """run() returns how many tokens it made. The first call compiles and captures."""
    run()
    rates = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = run()
        torch.cuda.synchronize()
        rates.append(made / (time.perf_counter() - start))
    return median(rates)


def our_engine(model: Transformer, sequences: int, sampling: Sampling) -> Callable[[], int]:
    """One engine for all calls, as a server has it. Prompts change, so that none is reused."""
    engine, calls = Engine(model, slots=sequences, capacity=PROMPT + NEW), 0

    def run() -> int:
        nonlocal calls
        calls += 1
        texts = [[(i + calls) % 50000 for i in prompt] for prompt in prompts(sequences)]
        streams = [engine.submit(text, max_tokens=NEW, sampling=sampling, sample=i) for i, text in enumerate(texts)]
        while engine.busy:
            engine.step()
        return sum(len(stream.tokens) for stream in streams)

    return run


def our_call(model: Transformer, sequences: int, sampling: Sampling) -> Callable[[], int]:
    """An engine of its own for every call, with its graphs."""
    options: dict[str, Any] = {"max_tokens": NEW, "sampling": sampling, "slots": sequences}
    return lambda: sum(map(len, generate_each(model, prompts(sequences), **options)))


def hugging_face(hf: Any, sequences: int, sampling: Sampling, cache: str) -> Callable[[], int]:
    """cache: dynamic runs eagerly; for static, transformers compiles the decode step into a CUDA graph."""
    ids = torch.tensor(prompts(sequences), device="cuda")
    options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "use_cache": True, "pad_token_id": 0}
    options |= {"do_sample": sampling.temperature > 0, "cache_implementation": cache}
    if sampling.temperature:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k}

    def run() -> int:
        with torch.inference_mode():
            return hf.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, PROMPT:].numel()

    return run


def hf_of(model: Transformer) -> Any:
    from tapeless.bench.hf import hf_family
    from tapeless.verify.hf_levels import hf_model

    params = {name: w.float().cpu() for name, w in model.params.items()}
    return hf_model(hf_family(model.config), model.config, params, "bfloat16", attention="sdpa").to("cuda")


def rows_that_differ(config: ModelConfig, dtype: str) -> tuple[int, int]:
    """Rows that have other bits in a prompt than alone or among others, and how many there were."""
    model = on_gpu(config, dtype)
    slots, longest = 65, max(length for _, length in COMPANY)
    text = torch.randint(config.vocab_size, (slots, longest), generator=torch.Generator().manual_seed(1)).cuda()
    kv_cache = model.kv_cache(slots, longest)

    def run(rows: list[tuple[int, int]]) -> torch.Tensor:  # (slot, position) of each -> (R, V)
        at = torch.tensor(rows, device="cuda").t()
        return model.decode(text[at[0], at[1]], at[0], at[1], kv_cache, check=False)

    in_prompt = {}
    for slot in range(slots):
        for first in range(0, longest, 64):
            chunk = [(slot, position) for position in range(first, min(first + 64, longest))]
            in_prompt |= dict(zip(chunk, run(chunk).cpu(), strict=True))
    held = [kv_cache.stacked[name][0].clone() for name in ("keys", "values")]
    differ, compared = 0, 0
    for others, length in COMPANY:
        row = (slots - 1, length - 1)
        beside = [(slot, (7 * slot + length) % longest) for slot in range(others - 1)]
        for rows in ([row], [row, *beside], [*beside, row]):
            for at, logits in zip(rows, run(rows).cpu(), strict=True):
                differ += not logits.equal(in_prompt[at])
                compared += 1
    same_cache = all(x.equal(kv_cache.stacked[name][0]) for name, x in zip(("keys", "values"), held, strict=True))
    return differ + (not same_cache), compared


def check_bits(claims: Claims) -> None:
    small = replace(config_of("llama-124m"), num_layers=2, vocab_size=2048)
    grouped = replace(small, num_kv_heads=3, qk_norm=True)
    gpt2 = replace(small, norm="layer", norm_bias=True, position="learned", ffn="gelu", attn_bias=True, ffn_bias=True)
    for name, config, dtype in (
        ("llama", small, "bfloat16"),
        ("qk-norm", grouped, "bfloat16"),
        ("gpt2", gpt2, "bfloat16"),
        ("llama", small, "float32"),
    ):
        differ, compared = rows_that_differ(config, dtype)
        claim = f"{name} in {dtype}: logits have the same bits in a prompt, alone, and among up to 64 rows"
        claims.check(claim, bound=f"0 of {compared}", measured=differ, ok=differ == 0)


def check_draws(claims: Claims) -> None:
    """On the same logits as the host's sampler: a draw may differ where u is at an edge of the distribution."""
    R, V, length = 64, 50304, 300
    some = [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {}, {"temperature": 0.0}, {"top_k": 500, "top_p": 0.7}]
    samplings = [Sampling(**{"temperature": 0.8, "repetition_penalty": 1 + 0.2 * (i % 2), **some[i % 6]}) for i in range(R)]
    generator = torch.Generator().manual_seed(2)
    logits = (4 * torch.randn(R, V, generator=generator)).bfloat16()
    history = torch.randint(V, (R, length), generator=generator)
    numbers = [(s.temperature, s.top_p, s.min_p, s.repetition_penalty) for s in samplings]
    state = SlotState(
        torch.tensor(numbers, dtype=torch.float64, device="cuda"),
        torch.tensor([(s.top_k, V) for s in samplings], dtype=torch.int32, device="cuda"),
        torch.zeros(R, V, dtype=torch.int8).scatter_(1, history, 1).cuda(),
        *torch.zeros(2, R, dtype=torch.int64, device="cuda"),
    )
    u = torch.tensor([uniform(s.seed, i, length) for i, s in enumerate(samplings)], dtype=torch.float64, device="cuda")
    from tapeless.kernels.triton.ops import triton_ops  # triton is not everywhere

    sampler = triton_ops().sampler
    assert sampler is not None
    found = sampler(logits.cuda(), torch.arange(R, device="cuda"), u, state).tolist()
    texts = zip(logits.float().numpy(), history.tolist(), samplings, strict=True)
    expected = [sample(*text, position=length, index=i) for i, text in enumerate(texts)]
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    claims.check(
        f"the device draws what the host draws, of {R} tokens", bound=f"at least {R - 1}", measured=same, ok=same >= R - 1
    )


def check_speed(claims: Claims, cases: list[Case], with_transformers: bool) -> list[dict[str, Any]]:
    rows = []
    for preset in dict.fromkeys(case.preset for case in cases):
        model = on_gpu(config_of(preset))
        hf = hf_of(model) if with_transformers else None
        for _, sequences, bound in (case for case in cases if case.preset == preset):
            for name, sampling in SAMPLINGS.items():
                rates = {
                    "engine": tokens_per_s(our_engine(model, sequences, sampling)),
                    "generate": tokens_per_s(our_call(model, sequences, sampling)),
                }
                if hf is not None:
                    for cache in ("dynamic", "static"):
                        run = hugging_face(hf, sequences, sampling, cache)
                        rates[f"transformers, {cache} cache"] = tokens_per_s(run, rounds=1)
                print(
                    f"{preset}, {sequences} sequences, {name}: " + ", ".join(f"{k} {v:,.0f}" for k, v in rates.items()),
                    flush=True,
                )
                claim = f"{preset}, {sequences} sequences, {name}: tokens/s"
                claims.check(claim, bound=f"{bound:,}", measured=f"{rates['engine']:,.0f}", ok=rates["engine"] >= bound)
                rows.append({"preset": preset, "sequences": sequences, "sampling": name, "tokens_per_s": rates})
        del model, hf
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return rows


def seconds(run: Callable[[], Any]) -> float:
    """Of a replay, by the clock of the GPU."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e4)
    return median(times)


def step_of(model: Transformer, rows: int) -> Callable[[], torch.Tensor]:
    """A step in the middle of the generation that is timed above."""
    kv_cache = model.kv_cache(rows, PROMPT + NEW)
    for name in ("keys", "values"):
        kv_cache.stacked[name][0].normal_()
    tokens = torch.tensor([prompt[0] for prompt in prompts(rows)], device="cuda")
    slots, positions = torch.arange(rows, device="cuda"), torch.full((rows,), PROMPT + NEW // 2, device="cuda")
    return lambda: model.decode(tokens, slots, positions, kv_cache, check=False)


def draw_of(model: Transformer, rows: int, sampling: Sampling) -> Callable[[], torch.Tensor]:
    decoder = DeviceDecoder(model, rows, 1)
    state, V = decoder._state, model.config.vocab_size
    state.numbers[:, 0], state.limits[:, 0], state.limits[:, 1] = sampling.temperature, sampling.top_k, V
    logits, slots = torch.randn(rows, V, device="cuda").bfloat16() * 4, torch.arange(rows, device="cuda")
    u = torch.rand(rows, dtype=torch.float64, device="cuda")
    sampler = model.ops.sampler
    assert sampler is not None
    return lambda: sampler(logits, slots, u, state)


def profile(cases: list[Case]) -> None:
    for preset, rows, bound in cases:
        model = on_gpu(config_of(preset))
        step = step_of(model, rows)
        print(f"\n{preset}, {rows} rows: {seconds(step) * 1e6:.0f} us a step; the bound allows {rows / bound * 1e6:.0f} us")
        for name, spent in sorted(spent_by_kind(step).items(), key=lambda item: -item[1].seconds):
            print(f"  {name:32} {spent.calls:6.1f} calls {spent.seconds * 1e6:8.1f} us")
        for name, sampling in SAMPLINGS.items():
            print(f"  a draw, {name}: {seconds(draw_of(model, rows, sampling)) * 1e6:.1f} us", flush=True)


def settings(rows: int) -> Iterator[tuple[str, Any, Any, list[Any]]]:
    """Of a step with this many rows: name, where the setting is, its key there, and what to try."""
    from tapeless.kernels.triton import decode

    tiles = decode.TILES[16 if rows <= 16 else decode.ROWS]
    some = [(16, 1, 6), (16, 2, 4), (16, 2, 8), (16, 2, 12), (16, 4, 6), (16, 4, 12), (32, 2, 4), (32, 2, 8), (32, 4, 4)]
    some += [(32, 4, 8), (64, 4, 3), (64, 4, 5), (64, 8, 3), (128, 8, 3)]
    for kind in tiles:
        yield kind, tiles, kind, [decode.Tile(*tile) for tile in some]
    yield "KEYS", vars(decode), "KEYS", [32, 128]
    yield "ATTENTION_WARPS", vars(decode), "ATTENTION_WARPS", [1, 2, 8]
    yield "ATTENTION_STAGES", vars(decode), "ATTENTION_STAGES", [1, 3, 4]
    yield "DEPTH", vars(decode), "DEPTH", [64, 256]


def sampler_settings() -> Iterator[tuple[str, Any, Any, list[Any]]]:
    from tapeless.kernels.triton import sample

    for name, values in {"BLOCK": [256, 1024], "WIDTH": [4096, 16384], "WARPS": [8, 32]}.items():
        yield name, vars(sample), name, values


def try_all(what: str, options: Iterator[tuple[str, Any, Any, list[Any]]], run: Callable[[], Any]) -> None:
    """One setting at a time, keeping the fastest."""
    from triton.runtime.errors import OutOfResources, PTXASError

    fastest = seconds(run)
    print(f"\n{what}: {fastest * 1e6:.1f} us", flush=True)
    for name, where, key, values in options:
        before, times = where[key], {}
        for value in values:
            where[key] = value
            try:
                times[value] = seconds(run)
            except (OutOfResources, PTXASError):
                continue
        where[key] = min([before, *times], key=lambda v: times.get(v, 0.995 * fastest))  # not for a tie
        fastest = times.get(where[key], fastest)
        tried = " ".join(f"{tuple(v) if isinstance(v, tuple) else v}:{t * 1e6:.0f}" for v, t in times.items())
        print(f"  {name} {before} -> {where[key]}, {fastest * 1e6:.1f} us   ({tried})", flush=True)


def tune(cases: list[Case]) -> None:
    for preset, rows, _ in cases:
        model = on_gpu(config_of(preset))
        try_all(f"{preset}, {rows} rows", settings(rows), step_of(model, rows))
        try_all(f"{preset}, {rows} draws, top-k 40", sampler_settings(), draw_of(model, rows, SAMPLINGS["top-k 40"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Generation on a GPU.")
    parser.add_argument("--cases", help="such as llama-124m:1,llama-1b:1; by default all")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        skip("needs a GPU")
    chosen = args.cases.split(",") if args.cases else []
    cases = [case for case in CASES if not chosen or f"{case.preset}:{case.sequences}" in chosen]
    if args.profile or args.tune:
        (tune if args.tune else profile)(cases)
        return
    claims = Claims("generation_cuda")
    check_bits(claims)
    check_draws(claims)
    rows = check_speed(claims, cases, not args.no_transformers)
    claims.finish(gpu=torch.cuda.get_device_name(), rates=rows)


if __name__ == "__main__":
    main()
