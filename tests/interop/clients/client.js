// A client of JetStream in Node that publishes notifications, or reads some: client URL publish|read COUNT.
const { connect, headers, StringCodec } = require("nats");

async function main() {
  const [url, what, count] = process.argv.slice(2);
  const connection = await connect({ servers: url });
  const stream = connection.jetstream({ timeout: 30000 });
  const text = StringCodec();
  if (what === "publish") {
    for (let step = 0; step < Number(count); step++) {
      const given = headers();
      given.set("Nats-Msg-Id", `node-${step}`);
      await stream.publish(`mars.od.${step}`, text.encode(JSON.stringify({ from: "node", n: step })), { headers: given });
    }
  } else {
    const consumer = await stream.consumers.get("MARS", { filterSubjects: "mars.>" });
    const messages = await consumer.fetch({ max_messages: Number(count), expires: 30000 });
    for await (const message of messages) {
      const found = {};
      for (const [name, values] of message.headers ?? []) found[name] = values;
      console.log(JSON.stringify({ subject: message.subject, headers: found, data: text.decode(message.data) }));
    }
  }
  await connection.drain();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
