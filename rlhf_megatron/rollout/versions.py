"""What samples say of the weights that they come from, and whether that can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_megatron.rollout.engine import GeneratedSample, VersionSpan

Groups = Sequence[Sequence[GeneratedSample]]


@dataclass
class Served:
    """Versions of weights that a fleet's engines have served."""

    current: int | None = None  # None: before the first sync
    past: set[int] = field(default_factory=set)  # the current one too

    def now(self, version: int) -> None:
        self.current = version
        self.past.add(version)


def spans_of(sample: GeneratedSample) -> tuple[VersionSpan, ...]:
    """Whole: of a sample that says nothing of spans, all tokens are of its version."""
    return sample.version_spans or (VersionSpan(sample.policy_version, 0, len(sample.token_ids)),)


def closed_problem(groups: Groups, version: int | None) -> str:
    """Of samples that were made between two syncs; `version`: that was served then, None: any. "": all is well."""
    versions = {sample.policy_version for group in groups for sample in group}
    if version is None or versions <= {version}:
        return ""
    return f"samples of version {sorted(versions)}, the current is {version}"


def open_problem(groups: Groups, sent_at: int | None, served: Served) -> str:
    """Of samples that went on over syncs. `sent_at`: the version that was served when they were asked for. "": each
    token is of a version that engines had since then, in order."""
    current = served.current
    if sent_at is None or current is None:
        return ""
    for sample in (sample for group in groups for sample in group):
        spans = spans_of(sample)
        versions = [span.version for span in spans]
        ends = [0, *(span.end for span in spans)]
        is_whole = all(s.start == end for s, end in zip(spans, ends[:-1], strict=True))
        if not is_whole or ends[-1] != len(sample.token_ids):
            return f"a sample of {len(sample.token_ids)} tokens with the versions of {spans}"
        if not sample.version_spans and sample.token_ids and sent_at != current:
            return f"a sample that does not say which tokens came before version {current}"
        if sample.policy_version != versions[0] or versions != sorted(versions):
            return f"a sample of version {sample.policy_version} whose tokens are of versions {versions}"
        wrong = [version for version in versions if version not in served.past or not sent_at <= version <= current]
        if wrong:
            return (
                f"samples of version {wrong}, though it was asked for them at version {sent_at} and the current one is"
                f" {current}"
            )
    return ""
