"""
baselines.py — the estimators Stratified GRPO is compared with: dr-grpo, rloo, reinforce, and ppo's critic.

    python train.py --advantage rloo        # also dr-grpo, reinforce, ppo; grpo and san are in stratgrpo.py

    (1) dr-grpo    A = R_i - mean                     of the group, not divided by its std
    (2) rloo       A = R_i - mean of the others       = n / (n - 1) (R_i - mean)
    (3) reinforce  A = R_i - mean of the batch        one baseline for all questions
    (4) ppo        A_t from a learned value V(state before token t), generalised advantage estimation, below

None of them knows strata, except ppo with --critic-sees-searches: its value may depend on the number of searches so
far, so that it can learn what a stratum earns instead of being told.

Departures:
 1. dr-grpo is only (1) here, the advantage. Its other half, no division by a rollout's length, is --loss token-mean,
    where every token of a mini-batch weighs the same.
 2. the critic is one linear layer on the policy's last hidden states, without a gradient into the policy: the
    estimators then differ in the advantage alone. (Search-R1 trains a second language model as critic.)
 3. forced tokens (passages) are part of the state and no action: GAE steps from sampled token to sampled token.
"""
import torch

from policy import MasterAdamW, last_hidden_states, micro_batches, pad_trajectories
from stratgrpo import check_rollouts

# ----------------------------------------------------------------------------------------------------------------------
# one advantage per rollout: rewards (N,) float, groups (N,) integer labels -> (N,) advantages in the dtype of rewards.
# ValueError as in stratgrpo.group_advantages


def dr_grpo_advantages(rewards, groups):
    """(1). Dr. GRPO: Liu et al. 2025 (arXiv 2503.20783)."""
    check_rollouts(rewards, groups=groups)
    index, count = groups.unique(return_inverse=True, return_counts=True)[1:]                   # (N,), (groups,)
    mean = rewards.new_zeros(len(count)).index_add(0, index, rewards) / count                   # (groups,)
    return rewards - mean[index]                                                                # (N,)


def rloo_advantages(rewards, groups):
    """(2). REINFORCE leave-one-out: Ahmadian et al. 2024 (arXiv 2402.14740). A lone rollout has no others: 0."""
    index, count = groups.unique(return_inverse=True, return_counts=True)[1:]                   # (N,), (groups,)
    count = count.to(rewards.dtype)  # a quotient of integers would be float32, whatever rewards are
    return dr_grpo_advantages(rewards, groups) * (count / (count - 1).clamp(min=1))[index]      # (N,)


def reinforce_advantages(rewards):
    """(3). REINFORCE with the batch mean as baseline: Williams 1992."""
    check_rollouts(rewards)
    return rewards - rewards.mean()                                                             # (N,)


# ----------------------------------------------------------------------------------------------------------------------
# one advantage per sampled token


def gae(reward, values, gamma=1.0, lam=1.0):
    """Generalised advantage estimation over the T sampled tokens of one rollout, whose reward comes after the last.

    reward float, values T floats, V before each sampled token -> T advantages, T returns = advantages + values.
        delta_t = gamma V_{t+1} - V_t, at the last token reward - V_T;    A_t = delta_t + gamma lam A_{t+1}
    gamma = lam = 1: A_t = reward - V_t. Source: Schulman et al. 2016 (arXiv 1506.02438), equation 16.
    """
    advantages, target, advantage = [], reward, 0.0
    for value in reversed(values):
        advantage = target - value + gamma * lam * advantage
        advantages.append(advantage)
        target = gamma * value  # the step before ends in this state, and earns nothing by itself
    advantages.reverse()
    return advantages, [advantage + value for advantage, value in zip(advantages, values)]


def searches_so_far(trajectory):
    """Executed searches before each sampled token, in order: a list as long as there are sampled tokens."""
    positions = [search.position for search in trajectory.searches]
    return [sum(p <= t for p in positions) for t, sampled in enumerate(trajectory.sampled) if sampled]


class Critic:
    """V(state before a sampled token): linear in the policy's hidden state there, and, when it sees searches, one bias
    more for every number of searches so far. Starts at 0 and learns by its own AdamW."""

    def __init__(self, model, max_searches, sees_searches, learning_rate):
        self.columns = max_searches + 1 if sees_searches else 0
        with torch.random.fork_rng(devices=[]):  # the policy's random numbers stay what they are without a critic
            self.head = torch.nn.Linear(model.config.hidden_size + self.columns, 1, device=model.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.optimizer = MasterAdamW(self.head, learning_rate, (0.9, 0.999), 0.0)
        self.learning_rate = learning_rate

    @torch.no_grad()
    def features(self, model, trajectories, token_budget):
        """-> for each trajectory (T, D + columns): what is known before each of its T sampled tokens."""
        found = {}
        for part in micro_batches(trajectories, token_budget):
            ids, sampled = pad_trajectories(part, model.device)                                     # (B, L) x 2
            hidden = last_hidden_states(model, ids).float()                             # (B, L, D)
            for row, trajectory in enumerate(part):
                state = hidden[row, sampled[row].nonzero()[:, 0] - 1]                               # (T, D)
                if self.columns:
                    counts = torch.tensor(searches_so_far(trajectory), device=model.device)         # (T,)
                    state = torch.cat([state, torch.nn.functional.one_hot(counts, self.columns)], 1)
                found[id(trajectory)] = state
        return [found[id(trajectory)] for trajectory in trajectories]

    def advantages(self, model, trajectories, lam, epochs, mini_batch, token_budget, generator):
        """PPO's advantages for one step's rollouts, then one fit of the value to their returns, in this order: a value
        that has seen a rollout's own reward would explain it away.

        -> (N, R) for every response token, 0 where forced, whitened over all sampled tokens (mean 0, std 1, as verl
        does), and {"value_loss", "value_explained"}: squared error before the fit, and 1 - error / Var[returns].
        """
        features = self.features(model, trajectories, token_budget)
        with torch.no_grad():
            values = self.head(torch.cat(features))[:, 0]                                           # (tokens,)
        counts = [len(state) for state in features]
        pairs = [gae(t.reward, value.tolist(), 1.0, lam) for t, value in zip(trajectories, values.split(counts))]
        advantages = torch.tensor([a for pair in pairs for a in pair[0]])                           # (tokens,)
        returns = torch.tensor([r for pair in pairs for r in pair[1]])                              # (tokens,)
        error, spread = advantages.square().mean(), returns.var(correction=0).clamp(min=1e-8)
        statistics = {"value_loss": error.item(), "value_explained": (1 - error / spread).item()}
        returns = returns.to(model.device).split(counts)
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        for _ in range(epochs):
            order = torch.randperm(len(trajectories), generator=generator).tolist()
            for start in range(0, len(order), mini_batch):
                batch = order[start : start + mini_batch]
                predicted = self.head(torch.cat([features[i] for i in batch]))[:, 0]                # (tokens,)
                (predicted - torch.cat([returns[i] for i in batch])).square().mean().backward()
                self.optimizer.step(self.learning_rate, 1.0)
        padded = torch.zeros(len(trajectories), max(len(t.response_ids) for t in trajectories))     # (N, R)
        for row, (trajectory, part) in enumerate(zip(trajectories, advantages.split(counts))):
            padded[row, : len(trajectory.sampled)][torch.tensor(trajectory.sampled, dtype=torch.bool)] = part
        return padded, statistics
