"""Tokens per second of `rollout=hf` against `model.generate`, on the tiny model, alternating within one process.

OMP_NUM_THREADS=1 python -m scripts.bench_sampler --new 16
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig

from conf.schema import Backend, TinyModelConfig
from recipes.models.build import build_model
from recipes.rollouts.hf import HFSampler
from recipes.rollouts.sampler import SampleRequest, Sampling


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--mixed", action="store_true", help="prompts of several lengths")
    parser.add_argument("--stops", action="store_true", help="stop ids end completions; else all are as long as can be")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()

    sizes = {"hidden_size": arguments.hidden_size, "intermediate_size": 4 * arguments.hidden_size}
    config = TinyModelConfig(**sizes, num_layers=arguments.layers)
    language_model = build_model(config, seed=0, backend=Backend.sdpa, device=arguments.device)
    model = language_model.model.to(getattr(torch, arguments.dtype))
    sampler = HFSampler(language_model, seed=0, batch_size=arguments.prompts * arguments.samples)
    if not arguments.stops:
        sampler.stops = set()
    generator = torch.Generator().manual_seed(0)
    requests = []
    for prompt in range(arguments.prompts):
        length = arguments.prompt_tokens - (prompt % 5 if arguments.mixed else 0)
        ids = tuple(torch.randint(3, language_model.vocab_size, (length,), generator=generator).tolist())
        requests += [SampleRequest(ids, prompt, n, max_new_tokens=arguments.new) for n in range(arguments.samples)]
    width = max(len(request.prompt_ids) for request in requests)
    rows = [list(request.prompt_ids) for request in requests]
    padded = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=arguments.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=arguments.device)
    generation = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=arguments.new,
        eos_token_id=sorted(sampler.stops) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )

    def ours() -> int:
        return sum(len(completion.ids) for completion in sampler.sample(requests, Sampling()))

    @torch.no_grad()
    def theirs() -> int:
        """`generate`, and log-probabilities from its logits."""
        model.eval()
        output = model.generate(input_ids=padded, attention_mask=mask, generation_config=generation)
        ids = output.sequences[:, width:]
        logits = torch.stack(output.logits, 1).float()
        torch.log_softmax(logits, -1).gather(2, ids[:, :, None]).squeeze(2).tolist()
        if not sampler.stops:
            return ids.numel()
        ends = torch.isin(ids, torch.tensor(sorted(sampler.stops), device=ids.device))
        return int((ends.cumsum(1) - ends.long() == 0).sum())

    rates: dict[str, list[float]] = {"model.generate": [], "rollout=hf": []}
    ways: dict[str, Callable[[], int]] = {"model.generate": theirs, "rollout=hf": ours}
    for repeat in range(arguments.repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            tokens = way()
            if repeat:  # the first warms up
                rates[name].append(tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"{name:>15} {medians[name]:8.0f} tokens/s  ({min(values):.0f} to {max(values):.0f})")
    print(f"{'ratio':>15} {medians['rollout=hf'] / medians['model.generate']:8.2f}")


if __name__ == "__main__":
    main()
