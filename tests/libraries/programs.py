"""Training steps in plain loops with libraries: models and losses, on small synthetic data.

Libraries are imported by the function that needs them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.libraries.training_steps import (
    PROGRAMS,
    Make,
    Program,
    classes,
    images,
    mlp,
    normal,
    program,
    trained,
    words,
)

# --- language models ---------------------------------------------------------------------------------------------


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes, **heads))


def _peft(config: Any) -> Program:
    from peft import get_peft_model

    model = get_peft_model(_llama(), config)

    def loss_of(words: Any) -> Any:
        return model(input_ids=words, labels=words, attention_mask=torch.ones_like(words)).loss

    return trained(model, loss_of, lambda i: (words(i, 4, 12),))


@program
def peft__lora() -> Program:
    from peft import LoraConfig

    return _peft(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


@program
def peft__dora() -> Program:
    from peft import LoraConfig

    return _peft(LoraConfig(r=4, use_dora=True, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"))


@program
def peft__prompt_tuning() -> Program:
    from peft import PromptTuningConfig

    return _peft(PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))


@program
def x_transformers__decoder() -> Program:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=32, rotary_pos_emb=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers))
    return trained(model, model, lambda i: (words(i, 4, 17),))


# --- images ------------------------------------------------------------------------------------------------------


@program
def diffusers__unet() -> Program:
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8}
    model = UNet2DModel(sample_size=16, in_channels=3, out_channels=3, **sizes, **blocks)
    scheduler, averages = DDPMScheduler(num_train_timesteps=100), EMAModel(model.parameters(), decay=0.99)

    def loss_of(x: Any) -> Any:
        noise, time = torch.randn_like(x), torch.randint(0, 100, (x.shape[0],))
        return F.mse_loss(model(scheduler.add_noise(x, noise, time), time).sample, noise)

    found = trained(model, loss_of, lambda i: (normal(i, 2, 3, 16, 16),))

    def step(x: Any) -> Any:
        loss = found.step(x)
        averages.step(model.parameters())
        return loss

    return Program(step, found.batch, model)


@program
def diffusers__conditional() -> Program:
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from diffusers.training_utils import compute_snr

    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    sizes = {"layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8}
    attention = {"cross_attention_dim": 16, "attention_head_dim": 4}
    model = UNet2DConditionModel(sample_size=8, in_channels=4, out_channels=4, **sizes, **attention, **blocks)
    scheduler = DDPMScheduler(num_train_timesteps=100)

    def loss_of(x: Any, text: Any) -> Any:
        noise, time = torch.randn_like(x), torch.randint(0, 100, (x.shape[0],)).long()
        found = model(scheduler.add_noise(x, noise, time), time, text, return_dict=False)[0]
        ratio = compute_snr(scheduler, time)
        weights = torch.stack([ratio, 5 * torch.ones_like(time)], dim=1).min(dim=1)[0] / ratio
        losses = F.mse_loss(found.float(), noise.float(), reduction="none").mean(dim=list(range(1, 4)))
        return (losses * weights).mean()

    return trained(model, loss_of, lambda i: (normal(i, 2, 4, 8, 8), normal(i + 50, 2, 5, 16)))


@program
def denoising_diffusion_pytorch__image() -> Program:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    model = GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=50)
    return trained(model, model, lambda i: (images(i, 2, 3, 16, 16),))


@program
def denoising_diffusion_pytorch__sequence() -> Program:
    from denoising_diffusion_pytorch import GaussianDiffusion1D, Unet1D

    unet = Unet1D(dim=16, dim_mults=(1, 2), channels=3)
    model = GaussianDiffusion1D(unet, seq_length=16, timesteps=50, objective="pred_v")
    return trained(model, model, lambda i: (images(i, 2, 3, 16),))


@program
def vit_pytorch__vit() -> Program:
    from vit_pytorch import ViT

    model = ViT(image_size=16, patch_size=4, numclasses=4, dim=32, depth=2, heads=2, mlp_dim=64)
    batch = lambda i: (normal(i, 4, 3, 16, 16), torch.arange(4))
    return trained(model, lambda x, y: F.cross_entropy(model(x), y), batch)


def _convolutions(classes: int) -> nn.Module:
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), *pooled, nn.Linear(8, classes))


@program
def byol_pytorch__byol() -> Program:
    from byol_pytorch import BYOL

    sizes = {"image_size": 16, "hidden_layer": -1, "projection_size": 8, "projection_hidden_size": 16}
    model = BYOL(_convolutions(16), augment_fn=nn.Identity(), augment_fn2=nn.Identity(), **sizes)
    found = trained(model, model, lambda i: (normal(i, 4, 3, 16, 16),))

    def step(x: Any) -> Any:
        loss = found.step(x)
        model.update_moving_average()
        return loss

    return Program(step, found.batch, model)


@program
def kornia__losses() -> Program:
    from kornia.filters import sobel
    from kornia.losses import ssim_loss, total_variation

    model = nn.Conv2d(3, 3, 3, padding=1)

    def loss_of(x: Any) -> Any:
        y = model(x)
        return ssim_loss(y, x, 5) + total_variation(y).mean() + sobel(y).mean()

    return trained(model, loss_of, lambda i: (images(i, 2, 3, 16, 16),))


@program
def kornia__augmentation() -> Program:
    from kornia import augmentation

    changes = (augmentation.RandomHorizontalFlip(p=0.5), augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1, p=1.0))
    augment, model = augmentation.AugmentationSequential(*changes, data_keys=["input"]), _convolutions(4)
    return trained(
        model,
        lambda x: F.cross_entropy(model(augment(x)), torch.arange(len(x)) % 4),
        lambda i: (images(i, 4, 3, 16, 16),),
    )


# --- graphs ------------------------------------------------------------------------------------------------------


def _graph(i: int) -> Any:
    from torch_geometric.data import Data

    numbers, nodes = torch.Generator().manual_seed(i), 20 + i % 5
    edges = torch.randint(0, nodes, (2, 60 + 3 * (i % 4)), generator=numbers)
    classes = torch.randint(0, 3, (nodes,), generator=numbers)
    return Data(x=torch.randn(nodes, 8, generator=numbers), edge_index=edges, y=classes)


def _graph_network(kind: str) -> Make:
    def make() -> Program:
        from torch_geometric import nn as layers

        convolution = getattr(layers, kind)
        model = nn.ModuleList([convolution(8, 16), layers.BatchNorm(16), convolution(16, 16), nn.Linear(16, 3)])

        def loss_of(graph: Any) -> Any:
            hidden = model[1](model[0](graph.x, graph.edge_index)).relu()
            return F.cross_entropy(model[3](model[2](hidden, graph.edge_index).relu()), graph.y)

        return trained(model, loss_of, lambda i: (_graph(i),))

    return make


for _kind in ("GCNConv", "GATConv", "GATv2Conv", "SAGEConv", "GraphConv", "TransformerConv", "TAGConv"):
    PROGRAMS[f"torch_geometric.{_kind}"] = _graph_network(_kind)


@program
def torch_geometric__pooled_batches() -> Program:
    from torch_geometric.data import Batch
    from torch_geometric.nn import GIN, global_add_pool

    network = GIN(8, 16, 2, out_channels=8)
    model = nn.ModuleList([network, nn.Linear(8, 2)])

    def loss_of(batch: Any) -> Any:
        pooled = global_add_pool(network(batch.x, batch.edge_index), batch.batch)
        return F.cross_entropy(model[1](pooled), batch.y[: batch.num_graphs] % 2)

    return trained(model, loss_of, lambda i: (Batch.from_data_list([_graph(10 * i + k) for k in range(4)]),))


@program
def e3nn__tensor_product() -> Program:
    from e3nn import o3

    linear = o3.Linear("4x0e+2x1o", "4x0e+2x1o")
    product = o3.FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1x1o", "4x0e")
    model = nn.ModuleList([linear, product])
    batch = lambda i: (normal(i, 5, 10), normal(i + 1, 5, 4))
    return trained(model, lambda x, y: product(linear(x), y).square().mean(), batch)


# --- losses, codes and distributions -----------------------------------------------------------------------------


@program
def pytorch_metric_learning__mined_triplets() -> Program:
    from pytorch_metric_learning import losses, miners

    model, loss, miner = mlp(), losses.TripletMarginLoss(margin=0.2), miners.MultiSimilarityMiner()

    def loss_of(x: Any, y: Any) -> Any:
        embeddings = model(x)
        return loss(embeddings, y, miner(embeddings, y))

    return trained(model, loss_of, lambda i: (normal(i, 16, 16), torch.arange(16) % 4))


@program
def pytorch_metric_learning__arcface() -> Program:
    from pytorch_metric_learning import losses

    model, arcface, contrast = mlp(), losses.ArcFaceLoss(4, 4), losses.NTXentLoss(0.1)

    def loss_of(x: Any, y: Any) -> Any:
        embeddings = model(x)
        return arcface(embeddings, y) + contrast(embeddings, y)

    batch = lambda i: (normal(i, 16, 16), torch.arange(16) % 4)
    return trained(nn.ModuleList([model, arcface]), loss_of, batch)


@program
def entmax__losses() -> Program:
    from entmax import entmax15, entmax15_loss, sparsemax

    model = nn.Linear(16, 4)

    def loss_of(x: Any, y: Any) -> Any:
        z = model(x)
        return entmax15(z, -1).square().sum() + sparsemax(z, -1).square().sum() + entmax15_loss(z, y).mean()

    return trained(model, loss_of, classes)


def _quantized(kind: str, width: int, **options: Any) -> Make:
    def make() -> Program:
        quantizer = getattr(importlib.import_module("vector_quantize_pytorch"), kind)(**options)
        model = nn.ModuleList([nn.Linear(8, width), quantizer, nn.Linear(width, 8)])

        def loss_of(x: Any) -> Any:
            found, _, *losses = quantizer(model[0](x))
            return (model[2](found) - x).square().mean() + sum(each.sum() for each in losses)

        return trained(model, loss_of, lambda i: (normal(i, 2, 12, 8),))

    return make


_DEAD_CODES = {"kmeans_init": True, "threshold_ema_dead_code": 2}
PROGRAMS |= {
    "vector_quantize_pytorch.codebook": _quantized("VectorQuantize", 16, dim=16, codebook_size=32, decay=0.8),
    "vector_quantize_pytorch.finite_scalars": _quantized("FSQ", 3, levels=[8, 5, 5]),
    "vector_quantize_pytorch.residual": _quantized(
        "ResidualVQ", 16, dim=16, codebook_size=16, num_quantizers=3, **_DEAD_CODES
    ),
}


@program
def zuko__spline_flow() -> Program:
    from zuko.flows import NSF

    model = NSF(features=3, transforms=2, hidden_features=[16])
    return trained(model, lambda x: -model().log_prob(x).mean(), lambda i: (normal(i, 16, 3),))


@program
def nflows__autoregressive() -> Program:
    from nflows import distributions, flows, transforms

    spline = transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(3, 8, tails="linear", tail_bound=3.0)
    affine = transforms.MaskedAffineAutoregressiveTransform(3, 8)
    chain = transforms.CompositeTransform([affine, transforms.ReversePermutation(3), spline])
    model = flows.Flow(chain, distributions.StandardNormal([3]))
    return trained(model, lambda x: -model.log_prob(x).mean(), lambda i: (normal(i, 16, 3),))


@program
def gpytorch__variational() -> Program:
    import gpytorch

    class Process(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            points = torch.linspace(0, 1, 8)[:, None]
            variational = gpytorch.variational.CholeskyVariationalDistribution(8)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, variational))
            self.mean = gpytorch.means.ConstantMean()
            self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))

    model, likelihood = Process(), gpytorch.likelihoods.GaussianLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, 64)
    return trained(
        nn.ModuleList([model, likelihood]),
        lambda x: -bound(model(x[:, None]), torch.sin(6 * x)),
        lambda i: (images(i, 16),),
    )


@program
def pyro__variational() -> Program:
    import pyro
    from pyro import distributions as dist
    from pyro.infer import SVI, Trace_ELBO

    pyro.clear_param_store()
    network = nn.Linear(3, 1)

    def model(x: Any, y: Any) -> None:
        pyro.module("network", network)
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        with pyro.plate("data", len(x)):
            pyro.sample("observed", dist.Normal(network(x).squeeze(-1), scale), obs=y)

    inference = SVI(model, lambda x, y: None, pyro.optim.Adam({"lr": 1e-2}), Trace_ELBO())
    return Program(lambda x, y: inference.step(x, y), lambda i: (normal(i, 8, 3), normal(i + 1, 8)), network)


def _solved(solver: str, **options: Any) -> Make:
    def make() -> Program:
        solve = getattr(importlib.import_module("torchdiffeq"), solver)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

        class Field(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.network = model

            def forward(self, t: Any, y: Any) -> Any:
                return self.network(y)

        field = Field()
        loss_of = lambda x: solve(field, x, torch.linspace(0, 1, 4), **options).square().mean()
        return trained(field, loss_of, lambda i: (normal(i, 4, 4),))

    return make


PROGRAMS |= {
    "torchdiffeq.rk4": _solved("odeint", method="rk4"),
    "torchdiffeq.dopri5": _solved("odeint"),
    "torchdiffeq.adjoint": _solved("odeint_adjoint", method="rk4"),
}


@program
def pytorch_tcn__tcn() -> Program:
    from pytorch_tcn import TCN

    model = TCN(4, [8, 8], dropout=0.1)
    return trained(model, lambda x: model(x).square().mean(), lambda i: (normal(i, 2, 4, 20),))


@program
def geoopt__poincare_ball() -> Program:
    import geoopt

    ball, model = geoopt.PoincareBall(), nn.Module()
    model.points = geoopt.ManifoldParameter(ball.random(8, 4), manifold=ball)
    optimizer = geoopt.optim.RiemannianAdam(model.parameters(), lr=1e-2)

    def step(x: Any) -> Any:
        loss = ball.dist(model.points, ball.expmap0(x)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(step, lambda i: (0.1 * normal(i, 8, 4),), model)


@program
def tensordict__sequence() -> Program:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    first = TensorDictModule(nn.Linear(4, 8), in_keys=["x"], out_keys=["hidden"])
    model = TensorDictSequential(first, TensorDictModule(nn.Linear(8, 1), in_keys=["hidden"], out_keys=["y"]))
    batch = lambda i: (TensorDict({"x": normal(i, 6, 4)}, [6]),)
    return trained(model, lambda given: model(given)["y"].square().mean(), batch)


@program
def stable_baselines3__policy() -> Program:
    from gymnasium import spaces
    from stable_baselines3.common.policies import ActorCriticPolicy

    policy = ActorCriticPolicy(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), lambda _: 3e-4)

    def step(seen: Any, actions: Any, advantages: Any, returns: Any, old: Any) -> float:
        values, log_prob, entropy = policy.evaluate_actions(seen, actions)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = torch.exp(log_prob - old)
        loss = -torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
        loss = loss + 0.5 * F.mse_loss(returns, values.flatten()) - 0.01 * entropy.mean()
        policy.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        policy.optimizer.step()
        return loss.item()

    def batch(i: int) -> tuple[Any, ...]:
        return normal(i, 16, 4), torch.arange(16) % 2, normal(i + 1, 16), normal(i + 2, 16), -normal(i, 16).abs()

    return Program(step, batch, policy)
