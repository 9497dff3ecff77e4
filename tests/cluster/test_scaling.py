"""The HorizontalPodAutoscaler adds routers under load, and takes them back."""

from helm import Installation
from kube import Report
from lockstep_tools.chaos.experiments import scripts
from lockstep_tools.chaos.kubectl import run_script
from lockstep_tools.chaos.release import ROUTER, of
from machine import wait_for

AT_ONCE = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 4, "periodSeconds": 5}]}
AUTOSCALING = {
    "router": {
        "resources": {"requests": {"cpu": "50m"}},
        "autoscaling": {
            "enabled": True,
            "minReplicas": 1,
            "maxReplicas": 2,
            "targetCPUUtilizationPercentage": 100,
            "behavior": {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE},
        },
    }
}


def test_routers_follow_the_load(open_served: Installation, report: Report) -> None:
    """Its load is a second generator in a pod, whose streams may fail: they are not checked here."""
    open_served.upgrade(AUTOSCALING)
    kubectl = open_served.kubectl
    environment = {"NAMESPACE": open_served.namespace, "RELEASE": open_served.release.name, "POD": "pressure"}
    run_script(scripts() / "load" / "run.sh", environment, 60.0)

    def routers() -> int:
        return len([pod for pod in of(open_served.release.pods(), ROUTER) if pod.ready and not pod.leaving])

    wait_for(lambda: routers() == 2, "a second router under load", 150.0, every_s=1.0)
    kubectl.run("delete", "pod", "pressure", "--grace-period=1")
    wait_for(lambda: routers() == 1, "one router without load", 240.0, every_s=1.0)
    output = kubectl.json("get", "hpa")["items"][0]["status"]
    report["hpa"] = {"desired": output["desiredReplicas"], "metrics": output.get("currentMetrics")}
