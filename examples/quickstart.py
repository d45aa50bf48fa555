"""Two learners and a syncer on one machine, in one file: python examples/quickstart.py

The learners never wait for each other. Each has its own data; what they agree on are the global weights.
"""

import multiprocessing
from multiprocessing.synchronize import Barrier

import torch

import diloco

STEPS, BATCH = 4000, 64


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(inputs), torch.sin(inputs[:, :4]).sum(dim=1, keepdim=True))


def learner(name: str, syncer: str, both_ready: Barrier) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(diloco.shard_seed(name))  # other data and other dropout than the other learners
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with diloco.DiLoCoOptimizer(optimizer, model, syncer=syncer, learner_id=name) as opt:
        both_ready.wait()  # only so that this example shows both at work; learners need not start together
        for step in range(STEPS):
            loss = loss_of(model, torch.randn(BATCH, 16))
            opt.zero_grad()
            loss.backward()
            opt.add_tokens(BATCH)
            opt.step()
            if step % 1000 == 0:
                print(f"{name}: step {step}, loss {loss.item():.3f}", flush=True)
        stats = opt.stats()
    print(f"{name}: {stats['contributions_merged']} contributions merged, {stats['blocked_s']:.3f} s inside diloco")


def main() -> None:
    processes = multiprocessing.get_context("spawn")
    both_ready = processes.Barrier(2)
    with diloco.Syncer(sync_every=8) as syncer:
        learners = [processes.Process(target=learner, args=(name, syncer.endpoint, both_ready)) for name in ("a", "b")]
        for process in learners:
            process.start()
        for process in learners:
            process.join()
        print(f"syncer: {syncer.status()['rounds_merged']} rounds merged")
        model = make_model()
        model.load_state_dict(syncer.weights())
    torch.manual_seed(1)
    print(f"loss of the global weights on new data: {loss_of(model, torch.randn(4096, 16)).item():.3f}")


if __name__ == "__main__":
    main()
