"""Stratified GRPO in tensors: strata -> advantages -> PPO-clip loss, and the numbers that show what stratifying does.

The method of "Stratified GRPO: Handling Structural Heterogeneity in Reinforcement Learning of LLM Search Agents"
(arXiv 2510.06214). Needs torch and nothing else: copy this file alone into your trainer. Check the example below with
    python -m doctest -v stratgrpo.py

A search agent's rollouts differ in structure: one searched once, its neighbour three times. GRPO judges both against
one mean, so a rollout is praised or blamed for its number of searches as much as for what it did with them. Stratified
GRPO judges a rollout against rollouts of the same structure only.

    rollout   one sampled trajectory i with a scalar reward R_i
    group     the G rollouts of one question; mean and s are the mean and standard deviation of its rewards
    stratum   the n_k rollouts of a group with the same structure k (here: the same number of executed searches);
              mean_k and s_k are the mean and standard deviation of its rewards

    (1) A_G   = R_i - mean                            centred group advantage
    (2) A_S   = R_i - mean_k                          centred stratum advantage
    (3) A_G   = A_S + (mean_k - mean)                 Proposition 1: the bracket is the cross-stratum bias
    (4) Var[A_G] - Var[A_S] = (1/G) sum_k n_k (mean_k - mean)^2  >= 0                     Theorem 1
    (5) A_GN  = (R_i - mean)   / (s + eps)            group_advantages: GRPO
    (6) A_SAN = (R_i - mean_k) / (s_k + eps)          stratified_advantages: stratified advantage normalisation, SAN
    (7) A     = alpha A_SAN + (1 - alpha) A_GN        blended_advantages: Stratified GRPO
    (8) loss  = mean over sampled tokens of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),
                r = exp(logp - logp_old)              ppo_clip_loss
    (9) k3    = exp(ref - logp) - (ref - logp) - 1    kl_k3: estimates KL(policy || reference)

The equation numbers are this file's own. The body of the paper was not available to us, so where the formulas above
leave a choice it is ours, and this is the numbered list of possible departures from the paper:

 1. A group is the G rollouts of one question *occurrence*: the same question twice in a batch is two groups.
 2. A stratum is a pair (group, label), in (6) and everywhere: the same label in another group is another stratum. The
    label is the number of *executed* searches: an empty query is one; a search asked for when none was allowed any
    more, or whose passages did not fit the context, is not.
 3. The standard deviations in (5) and (6) are population ones (divide by n). Only then do the claims hold as eps -> 0:
    in every stratum with spread E[A_SAN] = 0 and Var[A_SAN] = 1; over a group Var[A_SAN] = the share of rollouts whose
    stratum has spread; rewards a R + b with a > 0 give the same advantages. verl, Search-R1 and TRL divide by n - 1:
    that is ddof=1.
 4. A group in (5), a stratum in (6), of one rollout or without spread gives exactly 0. Spread means max > min, never a
    small std: the float32 std of equal rewards need not be 0. (verl hands a lone rollout its raw reward.) What else
    may be done with a small stratum: see stratified_advantages.
 5. The mean in (8) runs over the sampled tokens of the whole optimizer batch, whatever the micro-batches are, so a long
    rollout weighs more than a short one. reduction="sequence-mean": the mean over rollouts of each one's token mean.
 6. (8) clips token ratios, without dual clip and without a clamp on logp - logp_old (verl: c = 3 and +-20). (9) belongs
    into the loss, not into the reward; verl clamps its exponent to +-20 and its value to +-10, we clamp neither.
 7. logp is taken at the sampling temperature, without top-k or top-p: the scored distribution is the sampled one.

A worked example: one question, eight rollouts that searched 0, 1 or 2 times. Those that searched once did well, 2 of 3,
so the one that failed (-1.41) did worse than GRPO thinks, and the two that succeeded (0.71) did nothing special:

>>> rewards = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.float64)
>>> groups = torch.zeros(8, dtype=torch.long)
>>> strata = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
>>> [round(a, 2) for a in group_advantages(rewards, groups).tolist()]
[1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0]
>>> [round(a, 2) for a in stratified_advantages(rewards, groups, strata).tolist()]
[1.41, -0.71, -0.71, 0.71, 0.71, -1.41, 1.0, -1.0]
"""

import torch

# ----------------------------------------------------------------------------------------------------------------------
# advantages. every tensor is 1-D over the N rollouts of a batch, all questions mixed, in any order


def check_rollouts(rewards, **labels):
    """one clear ValueError before any arithmetic: a NaN reward would poison its whole group in silence"""
    if not isinstance(rewards, torch.Tensor) or rewards.ndim != 1 or not rewards.is_floating_point():
        raise ValueError("rewards must be a 1-D float tensor with one entry per rollout")
    if len(rewards) == 0:
        raise ValueError("rewards is empty: a batch needs at least one rollout")
    if not rewards.isfinite().all():
        bad = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"rewards[{bad}] is {rewards[bad].item()}: every reward must be finite")
    for name, label in labels.items():
        is_integer = isinstance(label, torch.Tensor) and not label.is_floating_point() and not label.is_complex()
        if not is_integer or label.dtype == torch.bool:
            raise ValueError(f"{name} must be an integer tensor with one label per rollout")
        if label.shape != rewards.shape:
            raise ValueError(f"{name} has shape {tuple(label.shape)}, but rewards has {tuple(rewards.shape)}")


def _pair(groups, strata):
    """one integer per (group, stratum label), convention 2"""
    groups = groups.unique(return_inverse=True)[1]  # (N,) renumbered 0, 1, 2, ... so that the product below is small
    labels, strata = strata.unique(return_inverse=True)  # (N,)
    return groups * len(labels) + strata  # (N,)


def _moments(values, cells, ddof=0):
    """moments of the C distinct cells, in sorted order, and the (N,) index from each rollout to its cell"""
    _, index, count = cells.unique(return_inverse=True, return_counts=True)  # (N,), (C,)
    values = values.double()  # a float32 sum over a million rollouts loses digits
    zeros = values.new_zeros(len(count))  # (C,)
    mean = zeros.index_add(0, index, values) / count  # (C,)
    squares = zeros.index_add(0, index, (values - mean[index]) ** 2)  # (C,)
    std = (squares / (count - ddof).clamp(min=1)).sqrt()  # (C,)
    highest = zeros.scatter_reduce(0, index, values, "amax", include_self=False)  # (C,)
    lowest = zeros.scatter_reduce(0, index, values, "amin", include_self=False)  # (C,)
    return index, count, mean, std, highest > lowest


def _check_options(eps, ddof):
    if not eps >= 0:
        raise ValueError(f"eps is {eps}: it must be >= 0")
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}: it must be 0 (divide by n) or 1 (divide by n - 1)")


def _normalise(rewards, mean, std, has_spread, eps):
    # convention 4. a lone rollout has no spread either
    return torch.where(has_spread, (rewards.double() - mean) / (std + eps), 0.0)  # (N,) double


def group_advantages(rewards, groups, eps=1e-6, ddof=0):
    """GRPO, equation (5).

    rewards (N,) float, groups (N,) integer labels -> (N,) advantages in the dtype of rewards.
    Raises ValueError naming the argument: wrong shape or dtype, empty batch, NaN or infinite reward, eps < 0, ddof not
    0 or 1.
    """
    check_rollouts(rewards, groups=groups)
    _check_options(eps, ddof)
    index, _, mean, std, has_spread = _moments(rewards, groups, ddof)
    return _normalise(rewards, mean[index], std[index], has_spread[index], eps).to(rewards.dtype)  # (N,)


def pool_small_strata(groups, strata, min_stratum):
    """Merge every stratum of fewer than min_stratum rollouts with the stratum of its group whose label is nearest.

    groups and strata (N,) integer labels -> (N,) labels. The smallest stratum goes first, of equal ones that with the
    lower label; of two equally near neighbours it joins the lower. A group too small altogether becomes one stratum.
    """
    pooled = strata.tolist()
    members = {}
    for i, group in enumerate(groups.tolist()):
        members.setdefault(group, {}).setdefault(pooled[i], []).append(i)
    for cells in members.values():
        while len(cells) > 1:
            label = min(cells, key=lambda label: (len(cells[label]), label))
            if len(cells[label]) >= min_stratum:
                break
            nearest = min(cells.keys() - {label}, key=lambda other: (abs(other - label), other))
            cells[nearest] += cells.pop(label)
        for label, indices in cells.items():
            for i in indices:
                pooled[i] = label
    return torch.tensor(pooled, dtype=strata.dtype, device=strata.device)  # (N,)


SMALL_STRATA = ("zero", "center", "pool", "shrink")


def stratified_advantages(rewards, groups, strata, eps=1e-6, ddof=0, min_stratum=2, small="zero", tau=4.0):
    """SAN, equation (6): a rollout is compared with the rollouts of its own group and stratum only.

    rewards (N,) float, groups and strata (N,) integer labels -> (N,) advantages in the dtype of rewards.

    The mean and std of two or three rewards are noise. small says what becomes of a stratum of n_k < min_stratum:
      zero      A_SAN = 0. with min_stratum=2, the default, this concerns lone rollouts only, which have 0 anyway
      center    R - mean_k, not divided by s_k
      pool      merged with the nearest stratum first, see pool_small_strata
      shrink    mean_k and s_k are drawn towards the group's mean and s: w mean_k + (1 - w) mean, the same for s,
                w = n_k / (n_k + tau). Only here may A_SAN of a stratum not sum to 0: part of the bias (3) comes back
    These rules are ours; the abstract of the paper is silent on small strata.
    Raises ValueError as group_advantages does, and for min_stratum < 1, an unknown rule, tau < 0.
    """
    check_rollouts(rewards, groups=groups, strata=strata)
    _check_options(eps, ddof)
    if min_stratum < 1 or not tau >= 0:
        raise ValueError(f"min_stratum is {min_stratum}, tau {tau}: they must be >= 1 and >= 0")
    if small not in SMALL_STRATA:
        raise ValueError(f"small is {small!r}: it must be one of {', '.join(SMALL_STRATA)}")
    if small == "pool":
        strata = pool_small_strata(groups, strata, min_stratum)  # (N,)
    index, count, mean, std, has_spread = _moments(rewards, _pair(groups, strata), ddof)
    count, mean, std = count[index], mean[index], std[index]  # (N,) each
    advantages = _normalise(rewards, mean, std, has_spread[index], eps)  # (N,)
    if small == "zero":
        replacement = torch.zeros_like(advantages)
    elif small == "center":
        replacement = rewards.double() - mean
    elif small == "shrink":
        group, _, group_mean, group_std, has_spread = _moments(rewards, groups, ddof)
        weight = count / (count + tau)
        mean = weight * mean + (1 - weight) * group_mean[group]
        std = weight * std + (1 - weight) * group_std[group]
        replacement = _normalise(rewards, mean, std, has_spread[group], eps)
    else:
        replacement = advantages  # pooled: a stratum that is still small is its whole group
    return torch.where(count < min_stratum, replacement, advantages).to(rewards.dtype)  # (N,)


def blended_advantages(rewards, groups, strata, alpha, eps=1e-6, ddof=0, **small_strata):
    """Stratified GRPO, equation (7). alpha = 0 is GRPO; alpha = 1 is SAN, which never prefers one stratum to another.

    rewards (N,) float, groups and strata (N,) integer labels -> (N,) advantages in the dtype of rewards.
    small_strata: min_stratum, small and tau of stratified_advantages.
    Raises ValueError as stratified_advantages does, and for alpha outside [0, 1] or NaN.
    """
    if not 0 <= alpha <= 1:  # false for NaN, too
        raise ValueError(f"alpha is {alpha}: it must lie in [0, 1]")
    stratified = stratified_advantages(rewards, groups, strata, eps, ddof, **small_strata)  # (N,)
    return alpha * stratified + (1 - alpha) * group_advantages(rewards, groups, eps, ddof)  # (N,)


# ----------------------------------------------------------------------------------------------------------------------
# loss. B rollouts padded to T tokens; mask is 1 where the policy sampled the token, 0 for prompt, passages and padding


def ppo_clip_loss(
    logprobs, old_logprobs, advantages, mask,
    clip_low=0.2, clip_high=0.2, reduction="token-mean", denominator=None, total_tokens=None,
):
    """PPO-clip, equation (8) -> (loss, statistics): a 0-d tensor, and a dict of detached 0-d tensors.

    logprobs      (B, T) float32 or float64, of the policy being trained: carries the gradient
    old_logprobs  (B, T) of the policy that sampled. where mask is 0 anything may stand, NaN included, here and above
    advantages    (B,) one per rollout, or (B, T)
    mask          (B, T) bool or 0/1
    reduction     "token-mean" or "sequence-mean", convention 5

    With micro-batches say how big the whole optimizer batch is, and the losses, gradients and statistics of its parts
    add up to those of the whole (ratio_min and ratio_max: take min and max). None means this batch is the whole.
    denominator   what the loss is divided by. token-mean: the sampled tokens of the whole batch; sequence-mean: the
                  number of its rollouts with a sampled token
    total_tokens  what the statistics are divided by: the sampled tokens of the whole batch. Only sequence-mean needs
                  it, for token-mean it is the denominator

    statistics    ratio_min, ratio_mean, ratio_max of r; clipfrac, the share of tokens whose gradient the clip removes;
                  approx_kl, the mean of (r - 1) - log r, an estimate of KL(old policy || policy) in nats per token.
                  without any sampled token ratio_min is inf and ratio_max -inf, so that min and max still combine

    Raises ValueError naming the argument: wrong shape, mask not 0/1, mask all 0 with denominator None, clip out of
    range, unknown reduction, denominator or total_tokens missing or smaller than this very batch. NaN at a sampled
    token is not hidden: it makes the loss NaN.
    Source: Schulman et al. 2017 (arXiv 1707.06347) equation 7; a clip_high of its own: DAPO (arXiv 2503.14476).
    """
    if logprobs.ndim != 2:
        raise ValueError(f"logprobs has shape {tuple(logprobs.shape)}: it must be (rollouts, tokens)")
    shape = tuple(logprobs.shape)
    for name, tensor in (("old_logprobs", old_logprobs), ("mask", mask)):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but logprobs has {shape}")
    if advantages.shape != shape and advantages.shape != shape[:1]:
        raise ValueError(f"advantages has shape {tuple(advantages.shape)}: it must be {shape[:1]} or {shape}")
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("mask must hold only 0 and 1 (1 where the policy sampled the token)")
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"clip_low is {clip_low}, clip_high {clip_high}: they must be in [0, 1] and >= 0")
    if reduction not in ("token-mean", "sequence-mean"):
        raise ValueError(f"reduction is {reduction!r}: it must be 'token-mean' or 'sequence-mean'")

    mask = mask.bool()  # (B, T)
    tokens = mask.sum(1)  # (B,)
    own_tokens = int(tokens.sum())
    own_denominator = own_tokens if reduction == "token-mean" else int((tokens > 0).sum())
    if denominator is None:
        if own_tokens == 0:
            raise ValueError("mask is 0 everywhere: no token was sampled, so there is no mean to take")
        denominator, total_tokens = own_denominator, own_tokens
    elif reduction == "token-mean":
        total_tokens = denominator
    elif total_tokens is None:
        raise ValueError("total_tokens is missing: sequence-mean with a denominator needs the token count, too")
    for name, whole, own in (("denominator", denominator, own_denominator), ("total_tokens", total_tokens, own_tokens)):
        if not whole >= max(own, 1):
            raise ValueError(f"{name} is {whole}, but this batch alone has {own}: pass the count of the whole batch")

    # masked before exp, not after: inf * 0 is NaN, in the loss and in its gradient
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)  # (B, T)
    ratio = log_ratio.exp()  # (B, T)
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand(shape)  # (B, T) every token of a rollout shares its advantage
    advantages = advantages.to(ratio.dtype).masked_fill(~mask, 0.0)  # (B, T) so that a forced token adds 0 to the loss
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)  # (B, T)
    if reduction == "sequence-mean":
        objective = objective / tokens.clamp(min=1)[:, None]  # (B, T)
    loss = -objective.sum() / denominator

    with torch.no_grad():
        # the clip bites only where going on would still pay: too likely and good, or too unlikely and bad
        clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))  # (B, T)
        statistics = {
            "ratio_min": ratio.masked_fill(~mask, float("inf")).min(),
            "ratio_mean": ratio.masked_fill(~mask, 0.0).sum() / total_tokens,
            "ratio_max": ratio.masked_fill(~mask, float("-inf")).max(),
            "clipfrac": clipped.to(ratio.dtype).sum() / total_tokens,
            "approx_kl": (torch.expm1(log_ratio) - log_ratio).sum() / total_tokens,  # forced tokens add 0
        }
    return loss, statistics


def kl_k3(logprobs, ref_logprobs):
    """k3, equation (9), elementwise: >= 0, and its mean over sampled tokens estimates KL(policy || reference) in nats.

    logprobs and ref_logprobs of one shape -> that shape. Not clamped (convention 6), and not masked: set both to 0 at
    forced positions before the call; masking the result would leave NaN in the gradient where k3 overflows.
    Raises ValueError on a shape mismatch. Source: http://joschu.net/blog/kl-approx.html
    """
    if logprobs.shape != ref_logprobs.shape:
        shapes = f"{tuple(ref_logprobs.shape)}, but logprobs has {tuple(logprobs.shape)}"
        raise ValueError(f"ref_logprobs has shape {shapes}")
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference  # expm1: exp(d) - 1 loses its digits when the policies are close


# ----------------------------------------------------------------------------------------------------------------------
# diagnostics


def stratum_report(rewards, groups, strata, advantages=None):
    """What stratifying sees in a batch, as plain Python numbers ready for json.

    rewards (N,) float, groups and strata (N,) integer labels, advantages (N,) float or None -> dict
      strata           {str(label): {...}} over all groups, in the order of the labels (json wants strings as keys)
        count, share   rollouts with this label, and their share of the batch
        reward_mean, reward_std   of these rollouts, population
        bias           mean over these rollouts of mean_k - mean, the bracket of (3): what GRPO pays for the label alone
        advantage_mean, advantage_var   of the advantages of these rollouts, population; only with advantages. The mean
                       is the push on the label itself, the variance the push inside it
      var_group        Var[A_G], population variance over the batch
      var_stratum      Var[A_S]
      gap              the right side of (4), from the means alone; equals var_group - var_stratum
      theorem1_error   |var_group - var_stratum - gap|, rounding error and nothing else
      dead_share       share of rollouts with A_SAN = 0 (no rule for small strata): SAN learns nothing from them
      singleton_share  share of rollouts that are alone in their stratum
    Raises ValueError as group_advantages does.
    """
    check_rollouts(rewards, groups=groups, strata=strata)
    group, _, group_mean, _, _ = _moments(rewards, groups)
    stratum, stratum_count, stratum_mean, _, _ = _moments(rewards, _pair(groups, strata))
    bias = stratum_mean[stratum] - group_mean[group]  # (N,)
    _, count, reward_mean, reward_std, _ = _moments(rewards, strata)  # by label, over all groups
    columns = {"count": count, "share": count / len(rewards), "reward_mean": reward_mean, "reward_std": reward_std,
               "bias": _moments(bias, strata)[2]}  # (labels,) each, labels in sorted order
    if advantages is not None:
        _, _, columns["advantage_mean"], advantage_std, _ = _moments(advantages, strata)
        columns["advantage_var"] = advantage_std**2
    rows = zip(*(column.tolist() for column in columns.values()))
    var_group = ((rewards.double() - group_mean[group]) ** 2).mean().item()  # A_G and A_S have mean 0
    var_stratum = ((rewards.double() - stratum_mean[stratum]) ** 2).mean().item()
    gap = (bias**2).mean().item()  # a mean over rollouts, so every stratum counts n_k times
    return {
        "strata": {str(label): dict(zip(columns, row)) for label, row in zip(strata.unique().tolist(), rows)},
        "var_group": var_group, "var_stratum": var_stratum, "gap": gap,
        "theorem1_error": abs(var_group - var_stratum - gap),
        "dead_share": (stratified_advantages(rewards, groups, strata) == 0).double().mean().item(),
        "singleton_share": (stratum_count[stratum] == 1).double().mean().item(),
    }
