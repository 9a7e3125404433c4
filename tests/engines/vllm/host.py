"""Runs in vLLM's own environment: one engine, told by lines of JSON what to do."""

import json
import os
import sys
import threading
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    """`host.py MODEL DIRECTORY OPTIONS`: answers go to the descriptor that stdout was at the start."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes where it likes
    model, directory, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    arguments: dict[str, Any] = {"model": model, "dtype": "bfloat16", "max_model_len": 2048}
    arguments |= {"enforce_eager": True, "max_num_seqs": 8, "seed": 0}
    if directory != "-":
        from convtools.refit.vllm.options import engine_arguments

        arguments |= engine_arguments(directory)
    llm = LLM(**(arguments | options))
    running: dict[str, Any] = {}

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def generate(prompts: list[list[int]], count: int) -> list[Any]:
        how = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=3)
        # One after another: which requests share a step is a matter of timing, and rounding with it.
        found = [llm.generate([{"prompt_token_ids": p}], how, use_tqdm=False)[0] for p in prompts]
        return [
            {
                "tokens": list(out.outputs[0].token_ids),
                "logprobs": [sorted((t, p.logprob) for t, p in at.items()) for at in out.outputs[0].logprobs],
                "cached": out.num_cached_tokens,
                "reason": out.outputs[0].finish_reason,
            }
            for out in found
        ]

    def run(prompts: list[list[int]], count: int) -> None:
        running["found"] = generate(prompts, count)

    say("ready")
    for line in sys.stdin:
        do, *given = json.loads(line)
        try:
            if do == "generate":
                say(generate(*given))
            elif do == "start":
                running["thread"] = threading.Thread(target=run, args=given, daemon=True)
                running["thread"].start()
                say(None)
            elif do == "done":
                running["thread"].join(given[0])
                say(None if running["thread"].is_alive() else running.pop("found"))
            elif do == "call":
                say(llm.collective_rpc(given[0]))
            elif do == "usage":
                say(sum(m.value for m in llm.get_metrics() if m.name == given[0]))
        except Exception as error:
            say({"error": repr(error)})


if __name__ == "__main__":
    main()
