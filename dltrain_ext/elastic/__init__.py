"""Jobs whose members come and go: who they are at a moment is agreed on in a torch.distributed store."""

from dltrain_ext.elastic.membership import Membership

__all__ = ["Membership"]
