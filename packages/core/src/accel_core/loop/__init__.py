"""The training loop: from `prepare` to the step, and what the user calls between them.

preparation, parameter_replacement, forward_methods, compilation    what becomes of models and
optimizers accumulation, forward_backward, fused_backward, gradients           windows of
micro-batches optimizer_gate, scheduler_gate        when a step is a step uneven_inputs, local_sgd
loops in which the ranks do not do the same memory, oom_vote, profiling           around the loop
"""
