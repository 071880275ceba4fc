// A client of JetStream in Go that publishes notifications, or reads some: client URL publish|read COUNT.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

const wait = 30 * time.Second

type read struct {
	Subject string              `json:"subject"`
	Headers map[string][]string `json:"headers"`
	Data    string              `json:"data"`
}

func main() {
	count, err := strconv.Atoi(os.Args[3])
	check(err)
	connection, err := nats.Connect(os.Args[1])
	check(err)
	defer connection.Close()
	stream, err := connection.JetStream(nats.MaxWait(wait))
	check(err)
	if os.Args[2] == "publish" {
		for step := 0; step < count; step++ {
			message := nats.NewMsg(fmt.Sprintf("mars.od.%d", step))
			message.Data = []byte(fmt.Sprintf(`{"from":"go","n":%d}`, step))
			message.Header.Set("Nats-Msg-Id", fmt.Sprintf("go-%d", step))
			_, err := stream.PublishMsg(message)
			check(err)
		}
		return
	}
	subscription, err := stream.SubscribeSync("mars.>", nats.OrderedConsumer())
	check(err)
	for ; count > 0; count-- {
		message, err := subscription.NextMsg(wait)
		check(err)
		check(json.NewEncoder(os.Stdout).Encode(read{message.Subject, message.Header, string(message.Data)}))
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
