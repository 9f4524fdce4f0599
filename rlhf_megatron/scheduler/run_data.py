"""What a run reads: prompts in their order, held-out sets, the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_megatron.config.schema import DataConfig, ModelConfig
from rlhf_megatron.data.items import prompt_batch
from rlhf_megatron.data.prompts import PromptSets, load_prompts
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.evaluation.evaluation import EvaluationSet
from rlhf_megatron.scheduler.stages import RunData


def load_data(model: ModelConfig, data: DataConfig) -> tuple[PromptSets, Tokenizer]:
    """Prompts and tokenizer of a run. Raises ValueError for what a user can fix; starts nothing."""
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.path)
    return load_prompts(data, tokenizer), tokenizer


def run_data(data: DataConfig, seed: int, stop: Sequence[str], sets: PromptSets, tokenizer: Tokenizer) -> RunData:
    """What the controller of a run reads. `seed`: of the order where `data` has none. `stop`: strings that end answers.

    Raises ValueError for a stop string that is not one token.
    """
    stops = [*tokenizer.eos_token_ids, *(tokenizer.token_id(text) for text in stop)]
    return RunData(
        stream=PromptStream(
            sets.sources, data.train_batch_size, data.shuffle, seed if data.seed is None else data.seed
        ),
        held_out=tuple(_evaluation_sets(sets)),
        tokenizer=tokenizer,
        stop_token_ids=tuple(dict.fromkeys(stops)),
    )


def _evaluation_sets(sets: PromptSets) -> Iterator[EvaluationSet]:
    """Group ids count over all sets, so that no two prompts share the seeds of their samples."""
    first = 0
    for held_out in sets.held_out_sets:
        yield EvaluationSet(held_out.name, prompt_batch(held_out.items, first))
        first += len(held_out.items)
