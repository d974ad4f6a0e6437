"""Prompts, a decoder and a tiny policy for tests of rollouts and rewards."""

from sampler_cases import EOS, prompts, weights

from rljax.data.online.prompts import PromptRecord, Prompts
from rljax.roles.models import Reference
from rljax.sampler import Decoding, Sampling
from rljax.sampler.whole_batch import DISPATCH_STEPS

ASKED = Sampling(max_response_tokens=3 * DISPATCH_STEPS, stop_ids=(EOS,))
LETTERS = "abcdefghijklmnopqrstuvwxyzABC"


class Letters:
    special_ids = frozenset()
    eos_ids = ()

    @staticmethod
    def decode(ids, skip_special_tokens=True):
        return "".join(LETTERS[i] for i in ids)


def asked_prompts(count=4):
    tokens, lengths = prompts(count)
    records = [
        PromptRecord(
            token_ids=tokens[i, : lengths[i]],
            prompt_text=f"p{i}",
            ground_truth=str(i),
            data_source="toy",
            extra_info={},
            index=i,
        )
        for i in range(count)
    ]
    return Prompts.from_records(records, length=tokens.shape[1])


def policy(model, **decoding) -> Reference:
    return Reference(weights(model), model, 1.0, Decoding(**decoding))
