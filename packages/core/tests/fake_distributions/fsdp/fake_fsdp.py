"""A plugin that works: a strategy with options, and a precision."""

from accel_core.contract.hook_specs import hookimpl


class FSDP:
    def __init__(self, reshard_after_forward=True, cpu_offload=False):
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload

    @hookimpl
    def prepare_model(self, model, request):
        return (model, request)


class Half:
    pass
