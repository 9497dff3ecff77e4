"""The address of the state server and the name that its certificate has to be for."""

import pytest
from lockstep_common.state_settings import StateAddressSettings
from pydantic import ValidationError

TLS = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a", "peer_identity": "router.test"}


def test_without_an_address_there_is_no_state_server():
    settings = StateAddressSettings()
    assert (settings.state_server, settings.state_identity) == ("", None)
    assert StateAddressSettings(**TLS).state_identity is None


def test_an_address_and_with_tls_a_name():
    assert StateAddressSettings(state_server="state:9100").state_server == "state:9100"
    assert StateAddressSettings(state_server="unix:/run/state", state_identity="state.test", **TLS).state_identity


@pytest.mark.parametrize(
    ("given", "name", "reason"),
    [
        ({"state_server": "state"}, "state_server", ""),
        ({"state_identity": "state.test"}, "state_identity", "needs tls_cert"),
        ({"state_server": "state:9100", **TLS}, "state_identity", "must be set"),
        ({"state_server": "state:9100", "state_identity": "spiffe://a/b", **TLS}, "state_identity", "DNS name"),
    ],
)
def test_what_cannot_be_used_is_named(given, name, reason):
    with pytest.raises(ValidationError) as refused:
        StateAddressSettings(**given)
    (error,) = refused.value.errors()
    assert error["loc"] == (name,)
    assert reason in error["msg"]
