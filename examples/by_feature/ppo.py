"""Reinforcement learning with PPO: each process plays in environments of its own, and all of them train one agent.

The environment is the pole on a cart (Barto, Sutton and Anderson, 1983), many at once as tensors; it needs no further package.
PPO is that of Schulman et al., 2017 (arXiv 1707.06347), with advantages by GAE (arXiv 1506.02438).

    python examples/by_feature/ppo.py
    accel launch --num-processes 2 examples/by_feature/ppo.py
    accel launch --num-processes 8 examples/by_feature/ppo.py --rounds 40
    accel launch --num-processes 2 --fsdp examples/by_feature/ppo.py
"""

import argparse

import torch
from torch import nn
from torch.distributions import Categorical

from accel_core import Accelerator, set_seed

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
STEPS = 64  # of each environment in a round


class Poles:
    """Carts with poles, all in one tensor (number, 4): position, speed, angle, its speed. One that falls begins again."""

    def __init__(self, number, device):
        self.state = 0.1 * torch.rand(number, 4, device=device) - 0.05

    def step(self, action):
        """Pushes each cart to the left (0) or right (1) for 0.02 seconds: whether its pole fell."""
        x, v, angle, w = self.state.unbind(1)
        force = torch.where(action == 1, 10.0, -10.0)
        push = (force + 0.05 * w.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        pull = push - 0.05 * turn * angle.cos() / 1.1
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * w, w + 0.02 * turn], 1)
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        self.state = torch.where(fell[:, None], 0.1 * torch.rand_like(self.state) - 0.05, self.state)
        return fell


class Agent(nn.Module):
    """From states (batch, 4) to the logits of the two actions and the value of the state."""

    def __init__(self):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state):
        return self.policy(state), self.value(state).squeeze(-1)


@torch.no_grad()
def play(agent, poles):
    """A round: (steps, number) tensors of states, actions, their log-probabilities, values, and which poles fell."""
    rows = []
    for _ in range(STEPS):
        state = poles.state
        logits, value = agent(state)
        choice = Categorical(logits=logits)
        action = choice.sample()
        rows.append((state, action, choice.log_prob(action), value, poles.step(action)))
    return [torch.stack(column) for column in zip(*rows, strict=True)], agent(poles.state)[1]


def advantages(values, after, fell):
    """What each action brought beyond the value of its state; the reward is 1 for every step."""
    found, ahead = torch.zeros_like(values), 0.0
    for step in reversed(range(STEPS)):
        stands = ~fell[step]
        ahead = 1 + GAMMA * after * stands - values[step] + GAMMA * LAMBDA * stands * ahead
        found[step], after = ahead, values[step]
    return found


def main():
    parser = argparse.ArgumentParser(description="Learns to balance a pole.")
    parser.add_argument("--poles", type=int, default=32, help="environments of one process")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()

    accelerator = Accelerator()
    set_seed(1)
    agent = Agent()
    agent, optimizer = accelerator.prepare(agent, torch.optim.Adam(agent.parameters(), lr=5e-3))
    set_seed(1, device_specific=True)  # each process has games of its own
    poles = Poles(options.poles, accelerator.device)

    for game in range(options.rounds):
        (states, actions, before, values, fell), after = play(agent, poles)
        gain = advantages(values, after, fell)
        returns = gain + values
        flat = [tensor.flatten(0, 1) for tensor in (states, actions, before, gain, returns)]
        for _ in range(4):
            for part in torch.randperm(len(flat[0]), device=accelerator.device).chunk(4):
                state, action, old, advantage, target = (tensor[part] for tensor in flat)
                logits, value = agent(state)
                choice = Categorical(logits=logits)
                ratio = (choice.log_prob(action) - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                bounded = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                loss = 0.5 * (value - target).square().mean() - bounded.mean() - 0.01 * choice.entropy().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        falls = 1000 * accelerator.reduce(fell.float().mean(), "mean").item()  # over the games of all processes
        if game == 0:
            accelerator.print(f"first round: {falls:.1f} falls in 1000 steps")
    played = accelerator.reduce(torch.tensor(fell.numel() * options.rounds, device=accelerator.device)).item()
    accelerator.print(f"last round: {falls:.1f} falls in 1000 steps; {played} steps played")
    accelerator.end_training()


if __name__ == "__main__":
    main()
