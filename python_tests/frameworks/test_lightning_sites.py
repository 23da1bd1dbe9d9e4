"""The callback that averages sites: each site has a Trainer of its own."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

pytestmark = [pytest.mark.needs("lightning"), pytest.mark.xdist_group("lightning")]

EPOCHS, STEPS, EVERY = 2, 5, 4  # steps of an epoch, so that the checkpoint is between two averages


def trainer_of(folder, epochs, callbacks):
    import lightning.pytorch as pl

    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def module_of(rank):
    import lightning.pytorch as pl

    from dltrain_ext import optim

    class Site(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))

        def training_step(self, batch):
            return (self.net(batch) - batch).square().mean()

        def configure_optimizers(self):
            return optim.AdamW(self.parameters(), lr=1e-2)

    return Site(), torch.randn(STEPS * 4, 32, generator=torch.Generator().manual_seed(rank))


def run(rank, world_size, folder):
    from torch.utils.data import DataLoader

    from dltrain_ext import local_sgd
    from dltrain_ext.lightning import DiLoCo

    found = []
    for _ in range(2):
        module, data = module_of(rank)
        callback = DiLoCo(sync_every=EVERY, codec="int4", min_compress_numel=0)
        trainer = trainer_of(folder, EPOCHS, [callback])
        trainer.fit(module, DataLoader(data, batch_size=4))
        assert isinstance(callback.outer, local_sgd.DiLoCo) and callback.outer.outer_steps == EPOCHS * STEPS // EVERY
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*found)

    module, data = module_of(rank)  # the same, with a stop between two averages
    trainer = trainer_of(folder, 1, [DiLoCo(sync_every=EVERY, codec="int4", min_compress_numel=0)])
    trainer.fit(module, DataLoader(data, batch_size=4))
    trainer.save_checkpoint(f"{folder}/{rank}.ckpt")
    module, data = module_of(rank)
    trainer = trainer_of(folder, EPOCHS, [DiLoCo(sync_every=EVERY, codec="int4", min_compress_numel=0)])
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=f"{folder}/{rank}.ckpt")
    kept = torch.cat([value.flatten() for value in callback.outer.state_dict()["backup"].values()])
    return kept, found[0], torch.cat([p.detach().flatten() for p in module.parameters()])


def test_sites_are_averaged_also_after_a_checkpoint(tmp_path):
    results = run_ranks(2, run, str(tmp_path), timeout=600, fresh=True)
    for kept, whole, continued in results:
        assert torch.equal(kept, results[0][0]), "all sites have the same bits"
        assert torch.equal(continued, whole), "a run that continues has the bits of one that never stopped"
