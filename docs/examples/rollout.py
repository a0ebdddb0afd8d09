"""A loop of weight updates on the demo's target, whose head goes on learning after each.

    python docs/examples/rollout.py [--updates 10] [--prompts 32] [--frozen]

Each update samples completions with `LLM.generate`, rewards them, takes a step of policy gradient
(REINFORCE, with the mean of a prompt's samples as its baseline), and serves the new weights by
`LLM.update_weights`. Then `LLM.adapt` trains the EAGLE-3 head on the completions. `--frozen` leaves
the head as it is: with the same seeds, tokens and rewards are the same, and only the drafts differ.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams

MODELS = Path("demo/models")
SAMPLES, TOKENS = 4, 64  # per prompt; per sample
HEAD = {
    "decoding_type": "Eagle3",
    "speculative_model": str(MODELS / "eagle3"),
    "max_draft_len": 4,
    "adaptive_draft_len": False,  # so that drafts of all updates are as long
}


def reward(text: str) -> float:
    """The share of lines with a comment: something that a policy learns in a few updates."""
    lines = [line for line in text.split("\n") if line.strip()]
    return sum("#" in line for line in lines) / max(1, len(lines))


def prompts(count: int) -> list[str]:
    """Beginnings of the texts that the demo's models were not trained on."""
    with open("demo/heldout.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    starts = [text[at : at + 120] for text in texts for at in range(0, len(text) - 400, 400)]
    return starts[:: max(1, len(starts) // count)][:count]


class Policy:
    """What is trained: transformers' own model of the target."""

    def __init__(self, rate: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            MODELS / "target", dtype=torch.float32, trust_remote_code=False
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)

    def learn(self, samples: list[tuple[list[int], list[int], float]]) -> None:
        """One pass over prompts, outputs and advantages, in steps of 32 samples."""
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
        for first in range(0, len(order), 32):
            chosen = [samples[index] for index in order[first : first + 32]]
            loss = torch.stack([self._loss(*each) for each in chosen]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _loss(self, prompt: list[int], output: list[int], advantage: float) -> torch.Tensor:
        tokens = torch.tensor([prompt + output])
        logits = self.model(tokens[:, :-1]).logits[0, len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])
        return -advantage * logprobs.mean()


def drafts(llm: LLM) -> tuple[int, int]:
    """Drafts of the head that serves, and their tokens that were accepted."""
    (stats,) = llm.stats()["drafters"].values()
    return stats["num_gen_drafts"], stats["num_acc_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60, help="of the head, after each update")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate of the policy")
    parser.add_argument("--frozen", action="store_true", help="the head does not learn")
    asked = parser.parse_args()
    policy, texts = Policy(asked.rate), prompts(asked.prompts)
    with tempfile.TemporaryDirectory() as folder:
        adaptation = {
            "folder": folder,
            "automatic": False,  # `LLM.adapt` begins every round
            "steps": asked.steps,
            "window": 128,
            "max_tokens": 60_000,  # of the last updates
            "trial_drafts": 0,  # every update changes what is accepted
        }
        llm = LLM(
            str(MODELS / "target"),
            executor="local",
            dtype="float32",
            speculative_config=HEAD,
            online_adaptation=None if asked.frozen else adaptation,
        )
        with llm:
            print("update  reward  accepted per draft  head")
            for update in range(asked.updates + 1):
                before, begun = drafts(llm), time.monotonic()
                outputs = llm.generate(
                    [text for text in texts for _ in range(SAMPLES)],
                    [
                        SamplingParams(
                            temperature=1.0, max_tokens=TOKENS, seed=1000 * update + each
                        )
                        for each in range(len(texts) * SAMPLES)
                    ],
                    use_tqdm=False,
                )
                seconds, after = time.monotonic() - begun, drafts(llm)
                count, accepted = after[0] - before[0], after[1] - before[1]
                rewards = torch.tensor([reward(each.outputs[0].text) for each in outputs])
                outcome = "frozen"
                if not asked.frozen:
                    done = llm.adapt()
                    outcome = done["outcome"] + done["reason"]
                print(
                    f"{update:6}  {rewards.mean():6.3f}  {accepted / count:18.3f}  {outcome}"
                    f"  ({seconds:.1f} s)",
                    flush=True,
                )
                if update == asked.updates:
                    break
                advantages = rewards.view(-1, SAMPLES) - rewards.view(-1, SAMPLES).mean(1, True)
                policy.learn(
                    [
                        (list(each.prompt_token_ids), list(each.outputs[0].token_ids), float(gain))
                        for each, gain in zip(outputs, advantages.flatten() * 4, strict=True)
                        if len(each.outputs[0].token_ids) and gain
                    ]
                )
                llm.update_weights(policy.model.state_dict())


if __name__ == "__main__":
    main()
