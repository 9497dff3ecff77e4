// Tenants with their limits, and what they use of them.

import { byId, element, keyed, setText } from "./dom.js";
import { count, shown } from "./words.js";

const CLASSES = { "-1": "low", 0: "normal", 1: "high" };
const use = ({ used, limit }) => (limit === null ? `${count(used)}, no limit` : `${count(used)} of ${count(limit)}`);

export function showTenants(tenants) {
  byId("tenant-table").hidden = !tenants.keys;
  const empty = byId("tenants-empty");
  empty.hidden = tenants.keys && tenants.count <= tenants.rows.length;
  if (tenants.keys) setText(empty, `The ${tenants.rows.length} busiest of ${tenants.count} tenants.`);
  keyed(byId("tenant-rows"), tenants.rows, (row) => row.name, (row) => element("tr", {},
    element("th", { scope: "row", text: shown(row.name) }), element("td"),
    ...[1, 2, 3].map(() => element("td", { class: "number" }))), (item, row) => {
    setText(item.children[1], CLASSES[row.priority] ?? row.priority);
    setText(item.children[2], use(row.streams));
    setText(item.children[3], row.requests.limit === null ? "no limit" : use(row.requests));
    setText(item.children[4], row.tokens.limit === null ? "no limit" : use(row.tokens));
  });
}
