// Prometheus text, and what changed between two readings of it.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

// [{name, labels, value}] of an exposition.
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\[n"\\]/g, (escape) => ESCAPES[escape]);
    }
    samples.push({ name: found[1], labels, value: Number(found[3].replace("Inf", "Infinity")) });
  }
  return samples;
}

// One reading: sums over all series of a name, or over those of one replica.
export class Reading {
  constructor(text, timeS) {
    this.timeS = timeS;
    this.byName = new Map();
    for (const sample of parseMetrics(text)) {
      if (!this.byName.has(sample.name)) this.byName.set(sample.name, []);
      this.byName.get(sample.name).push(sample);
    }
  }

  samples(name, replica) {
    const all = this.byName.get(name) ?? [];
    if (!replica) return all;
    return all.filter(({ labels }) => labels.model_name === replica.model_name && labels.engine === replica.engine);
  }

  sum(name, replica) {
    return this.samples(name, replica).reduce((total, sample) => total + sample.value, 0);
  }

  mean(name) {
    const all = this.samples(name);
    return all.length ? this.sum(name) / all.length : null;
  }

  get replicas() {
    const labels = this.samples("vllm:num_requests_running").map((sample) => sample.labels);
    return labels.sort((a, b) => a.model_name.localeCompare(b.model_name) || a.engine - b.engine);
  }
}

// A replica that was replaced counts from zero again: then what it counts now is the change.
function change(now, before) {
  return now >= before ? now - before : now;
}

// What a counter grew between two readings, replica by replica.
export function growth(name, now, before, replica) {
  const replicas = replica ? [replica] : now.replicas;
  return replicas.reduce((total, one) => total + change(now.sum(name, one), before.sum(name, one)), 0);
}

export function rate(name, now, before, replica) {
  const span = now.timeS - before.timeS;
  return span > 0 ? growth(name, now, before, replica) / span : null;
}

// A share of two counters' growth; null when nothing was counted.
export function share(part, whole, now, before, replica) {
  const counted = growth(whole, now, before, replica);
  return counted > 0 ? growth(part, now, before, replica) / counted : null;
}

// The quantile of what a histogram saw between two readings, linear within a bucket; null when it saw nothing.
export function quantile(name, q, now, before) {
  const buckets = new Map();
  const add = (reading, sign) => {
    for (const { labels, value } of reading.samples(`${name}_bucket`)) {
      const bound = Number(labels.le.replace("Inf", "Infinity"));
      buckets.set(bound, (buckets.get(bound) ?? 0) + sign * value);
    }
  };
  add(now, 1);
  add(before, -1);
  const bounds = [...buckets.keys()].sort((a, b) => a - b);
  const total = buckets.get(bounds.at(-1)) ?? 0;
  if (!(total > 0)) return null;
  let low = 0;
  let below = 0;
  for (const bound of bounds) {
    const count = buckets.get(bound);
    if (count >= q * total) {
      if (bound === Infinity) return low;
      return low + ((bound - low) * (q * total - below)) / Math.max(1e-9, count - below);
    }
    low = bound;
    below = count;
  }
  return low;
}
