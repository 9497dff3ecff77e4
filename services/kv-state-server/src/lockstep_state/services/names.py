"""The Sessions and Leases services."""

from lockstep_api.v1 import state_pb2, state_pb2_grpc

from lockstep_state.backend import Backend, Binding, Lease
from lockstep_state.keys import Kind, key_of
from lockstep_state.services.calls import Running, unary
from lockstep_state.services.checks import Times, check_epoch, check_name
from lockstep_state.settings import StateSettings


class Sessions(state_pb2_grpc.SessionsServicer):
    """Which worker serves a session."""

    def __init__(self, backend: Backend, settings: StateSettings, running: Running) -> None:
        self._backend = backend
        self._times = Times(settings.ttl_s, settings.max_ttl_s)
        self.timeout_s = settings.call_timeout_s
        self.running = running

    @unary("Sessions.Bind")
    async def Bind(self, request: state_pb2.BindRequest) -> state_pb2.SessionResponse:  # noqa: N802
        """Bind a session to a worker."""
        key = _session_key(request.tenant, request.session)
        worker = Binding(check_name("worker_id", request.worker_id).encode())
        expected = None
        if request.HasField("if_worker"):
            expected = check_name("if_worker", request.if_worker, may_be_empty=True).encode()
        tenant, ttl_s = key_of(Kind.TENANT, request.tenant), self._times.check("ttl_s", request.ttl_s)
        done, now = await self._backend.bind(tenant, key, worker, ttl_s, expected)
        return state_pb2.SessionResponse(worker_id=now.target.decode(), bound=done)

    @unary("Sessions.LookUp")
    async def LookUp(self, request: state_pb2.LookUpSessionRequest) -> state_pb2.SessionResponse:  # noqa: N802
        """The worker of a session."""
        return _session(await self._backend.bound(_session_key(request.tenant, request.session)))

    @unary("Sessions.Touch")
    async def Touch(self, request: state_pb2.TouchSessionRequest) -> state_pb2.SessionResponse:  # noqa: N802
        """The worker of a session, which is kept for longer."""
        key = _session_key(request.tenant, request.session)
        tenant, ttl_s = key_of(Kind.TENANT, request.tenant), self._times.check("ttl_s", request.ttl_s)
        return _session(await self._backend.touch(tenant, key, ttl_s))

    @unary("Sessions.Expire")
    async def Expire(self, request: state_pb2.ExpireSessionRequest) -> state_pb2.ExpireSessionResponse:  # noqa: N802
        """Forget a session."""
        key = _session_key(request.tenant, request.session)
        expired = await self._backend.unbind(key_of(Kind.TENANT, request.tenant), key, None)
        return state_pb2.ExpireSessionResponse(expired=expired)


class Leases(state_pb2_grpc.LeasesServicer):
    """Who may act for a name."""

    def __init__(self, backend: Backend, settings: StateSettings, running: Running) -> None:
        self._backend = backend
        self._times = Times(settings.ttl_s, settings.max_ttl_s)
        self.timeout_s = settings.call_timeout_s
        self.running = running

    @unary("Leases.Acquire")
    async def Acquire(self, request: state_pb2.AcquireLeaseRequest) -> state_pb2.LeaseResponse:  # noqa: N802
        """Take a lease that no other owner holds."""
        owner, ttl_s = check_name("owner", request.owner), self._times.check("ttl_s", request.ttl_s)
        return _lease(*await self._backend.acquire(_lease_key(request.name), owner, ttl_s))

    @unary("Leases.Renew")
    async def Renew(self, request: state_pb2.RenewLeaseRequest) -> state_pb2.LeaseResponse:  # noqa: N802
        """Hold a lease for longer."""
        owner, epoch = check_name("owner", request.owner), check_epoch("epoch", request.epoch)
        ttl_s = self._times.check("ttl_s", request.ttl_s)
        return _lease(*await self._backend.renew(_lease_key(request.name), owner, epoch, ttl_s))

    @unary("Leases.Release")
    async def Release(self, request: state_pb2.ReleaseLeaseRequest) -> state_pb2.LeaseResponse:  # noqa: N802
        """Give a lease back."""
        owner, epoch = check_name("owner", request.owner), check_epoch("epoch", request.epoch)
        return _lease(*await self._backend.release(_lease_key(request.name), owner, epoch))

    @unary("Leases.LookUp")
    async def LookUp(self, request: state_pb2.LookUpLeaseRequest) -> state_pb2.LeaseResponse:  # noqa: N802
        """A lease now."""
        lease = await self._backend.lease(_lease_key(request.name))
        return _lease(bool(lease.owner), lease)


def _session_key(tenant: str, session: str) -> str:
    check_name("tenant", tenant)
    return key_of(Kind.SESSION, tenant, check_name("session", session).encode())


def _lease_key(name: str) -> str:
    return key_of(Kind.LEASE, "", check_name("name", name).encode())


def _session(binding: Binding | None) -> state_pb2.SessionResponse:
    return state_pb2.SessionResponse(worker_id="" if binding is None else binding.target.decode())


def _lease(done: bool, lease: Lease) -> state_pb2.LeaseResponse:
    return state_pb2.LeaseResponse(granted=done, owner=lease.owner, epoch=lease.epoch, expires_in_s=lease.expires_in_s)
