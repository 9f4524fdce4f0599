"""Optimizers and schedules. verl's schedules move once a step of the loop, ours at each optimizer step."""

from __future__ import annotations

from rlhf_megatron.config.from_verl.draft import Draft
from rlhf_megatron.config.from_verl.of_batches import optimizer_steps_a_step
from rlhf_megatron.config.from_verl.of_trainer import total_steps

STYLES = {"inverse_square_root": "inverse-square-root"}
UNIT = "optimizer steps here, steps of the loop there"


def optim(draft: Draft, role: str) -> None:
    g, section = draft.given, f"{role}.optim"
    for name in ("lr", "weight_decay"):
        draft.copy(f"{section}.{name}", value=g.number(f"{section}.{name}"))
    draft.copy(f"{section}.betas")
    old = f"{role}.grad_clip"
    if g.get(old) is not None and not g.has(f"{section}.clip_grad"):
        draft.put(f"{section}.clip_grad", g.number(old), (old, f"{section}.clip_grad"))
    else:
        draft.copy(f"{section}.clip_grad")
    kind = f"{section}.optimizer"
    if str(g.look(kind)).lower() in ("adam", "adamw"):
        g.ignore(kind)
    else:
        draft.leave(kind, "the optimizer is AdamW", learns=True)
    _schedule(draft, role, section)


def _schedule(draft: Draft, role: str, section: str) -> None:
    g, per = draft.given, optimizer_steps_a_step(draft.given, role)
    former = next((f"{section}.{n}" for n in ("lr_scheduler_type", "warmup_style") if g.has(f"{section}.{n}")), None)
    style = f"{section}.lr_decay_style"
    if former is not None and not g.has(style):
        draft.put(style, STYLES.get(str(g.get(former)), g.get(former)), (former, style))
    elif str(g.look(style)).lower() == "wsd":
        draft.leave(style, "warm-up, stable and decay phases are not there; use another style", learns=True)
    else:
        draft.copy(style, value=STYLES.get(str(g.get(style)), g.get(style)))
    _warmup(draft, role, section, per)
    decay = f"{section}.lr_decay_steps"
    if g.get(decay) is not None and per is not None and (steps := g.whole(decay, low=-1)) is not None and steps > 0:
        draft.put(decay, steps * per, (decay,), f"{UNIT}: {steps} x {per}")
    draft.copy(f"{section}.min_lr", value=g.number(f"{section}.min_lr"))
    ratio, lr = f"{section}.min_lr_ratio", g.number(f"{section}.lr")
    if g.get(ratio) is not None and (share := g.number(ratio)) is not None and lr is not None:
        draft.put(f"{section}.min_lr", float(f"{share * lr:.12g}"), (ratio,), f"{share} x lr {lr}")


def _warmup(draft: Draft, role: str, section: str, per: int | None) -> None:
    g, source = draft.given, f"{section}.lr_warmup_steps"
    ratio_source, key = f"{section}.lr_warmup_steps_ratio", f"{section}.lr_warmup_steps"
    g.ignore(source, ratio_source)
    steps = g.whole(source, low=-1) if g.look(source) is not None else None
    if per is not None and steps is not None and steps > 0:
        draft.put(key, steps * per, (source,), f"{UNIT}: {steps} x {per}")
        return
    ratio = g.number(ratio_source) if g.look(ratio_source) is not None else None
    if not ratio or per is None:
        return
    decay = g.look(f"{section}.lr_decay_steps")
    end = decay if isinstance(decay, int) and decay > 0 else total_steps(draft)
    if end is None:
        draft.leave(
            ratio_source,
            "a share of the run's steps, which are not known: give trainer.total_training_steps, or --train-rows",
            learns=True,
        )
        return
    steps = int(ratio * end)
    draft.put(key, steps * per, (ratio_source,), f"{UNIT}: {ratio} x {end} = {steps}, x {per}")
