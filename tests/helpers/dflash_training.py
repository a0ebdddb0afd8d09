"""A block drafter that is taught a handful of texts, so that a wrong reading of it shows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from outrider.drafters.heads.dflash import BlockModule, BlockOptions
from outrider.drafters.heads.llama import LayerSizes, Rope
from outrider.drafters.heads.protocol import BlockView

from .dflash import write_block


def teach_block(
    folder: Path, target: str, texts: list[list[int]], outputs: tuple[int, ...], mask: int
) -> str:
    """A head of blocks of 4 in z-lab's layout, which has learnt `texts` by heart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    sizes = LayerSizes(hidden, hidden, 48, 4, 2, 8, 1e-6, qk_norm=True)
    options = BlockOptions((BlockView(),) * 2, len(outputs))
    facts = {"target_hidden_size": hidden, "target_vocab_size": vocab}
    module = BlockModule(sizes, 2, Rope(8, 1e4), options, **facts)
    tokens, width = torch.tensor(texts), 4
    length = tokens.shape[1]
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in outputs], dim=-1)
        embedding = model.get_input_embeddings().weight.detach()
    anchors = torch.arange(2, length - width + 1)
    positions = (anchors[:, None] + torch.arange(width)).flatten()
    # Rows see the context before their block, and their block.
    block = torch.arange(len(anchors)).repeat_interleave(width)
    before = torch.arange(length) < anchors[block][:, None]
    seen = torch.cat([before, block[:, None] == block], dim=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3)
    for _ in range(150):
        loss = torch.zeros(())
        for text, feature in zip(tokens, features, strict=True):
            context = list(module.context(feature, torch.arange(length)))

            def attend(layer, query, key, value, scale, context=context):
                keys, values = (
                    torch.cat(pair).transpose(0, 1).repeat_interleave(2, 0)
                    for pair in zip(context[layer], (key, value), strict=True)
                )
                rows = (query.transpose(0, 1), keys, values)
                return scaled_dot_product_attention(*rows, seen, scale=scale).transpose(0, 1)

            rows = module.embed(embedding[text[anchors]], embedding[mask], width)
            read = module.drafted(module(rows, positions.view(-1, width), attend))
            logits = model.get_output_embeddings()(read)
            wanted = torch.stack([text[anchors + ahead] for ahead in range(1, width)], dim=1)
            loss = loss + cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    inner = {"mask_token_id": mask, "target_layer_ids": list(outputs)}
    config = {
        "block_size": width,
        "dflash_config": inner,
        "num_attention_heads": 4,
        "head_dim": 8,
        "rope_theta": 1e4,
        "pad_token_id": 7,
        "vocab_size": vocab,
    }
    tensors = {name: each.detach().clone() for name, each in module.state_dict().items()}
    return write_block(folder, config, tensors)
