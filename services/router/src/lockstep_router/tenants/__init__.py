"""Who may use the router, and how much: tenants, their API keys and their limits. It knows no transport."""

from lockstep_router.tenants.key_file import Access, KeyFile
from lockstep_router.tenants.limits import Account, TenantLimits
from lockstep_router.tenants.tenant import Tenant

__all__ = ["Access", "Account", "KeyFile", "Tenant", "TenantLimits"]
