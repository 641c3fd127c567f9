"""Fused routing of experts, absent; Megatron takes its own where these are None."""

fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = None
