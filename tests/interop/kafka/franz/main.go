// What users of franz-go do: a session that reads, writes and commits in transactions, a share group, administration.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const records = 200

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func client(options ...kgo.Opt) *kgo.Client {
	made, err := kgo.NewClient(append(options, kgo.SeedBrokers(os.Args[1]))...)
	must(err)
	return made
}

// Every record of one topic goes to the other exactly once, though every third transaction is given up.
func transform(ctx context.Context, name string, from string, to string, options ...kgo.Opt) {
	session, err := kgo.NewGroupTransactSession(append(options,
		kgo.SeedBrokers(os.Args[1]), kgo.TransactionalID(name), kgo.ConsumerGroup(name), kgo.ConsumeTopics(from),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.RequireStableFetchOffsets(), kgo.FetchMaxPartitionBytes(1000))...)
	must(err)
	defer session.Close()
	for done, tries := 0, 1; done < records; tries++ {
		fetched := session.PollRecords(ctx, 20)
		must(fetched.Err())
		must(session.Begin())
		fetched.EachRecord(func(one *kgo.Record) {
			session.Produce(ctx, &kgo.Record{Topic: to, Key: one.Key, Value: one.Value}, func(_ *kgo.Record, err error) { must(err) })
		})
		must(session.Client().Flush(ctx)) // what is given up is in the log, too
		committed, err := session.End(ctx, kgo.TransactionEndTry(tries%3 != 0))
		must(err)
		if committed {
			done += fetched.NumRecords()
		}
	}
}

func exact(ctx context.Context, topic string) bool {
	reader := client(kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	defer reader.Close()
	seen := map[string]int{}
	for count := 0; count < records; {
		fetched := reader.PollFetches(ctx)
		must(fetched.Err())
		fetched.EachRecord(func(one *kgo.Record) { seen[string(one.Value)]++; count++ })
	}
	return len(seen) == records
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Second)
	defer cancel()
	name := os.Args[2]
	plain := client()
	defer plain.Close()
	admin := kadm.NewClient(plain)
	for _, topic := range []string{"-in", "-classic", "-new"} {
		_, err := admin.CreateTopic(ctx, 3, 1, nil, name+topic)
		must(err)
	}
	for number := range records {
		text := []byte(strconv.Itoa(number))
		must(plain.ProduceSync(ctx, &kgo.Record{Topic: name + "-in", Key: text, Value: text}).FirstErr())
	}

	transform(ctx, name+"-classic", name+"-in", name+"-classic")
	transform(ctx, name+"-new", name+"-in", name+"-new", kgo.ServerSideBalancer(), kgo.Balancers(kgo.StickyBalancer()))
	for _, kind := range []string{"-classic", "-new"} {
		lags, err := admin.Lag(ctx, name+kind)
		must(err)
		fmt.Println("transformed", kind, exact(ctx, name+kind), "lag", lags[name+kind].Lag.Total())
	}
	for _, kind := range []string{"classic", "consumer"} {
		listed, err := admin.ListGroupsByType(ctx, []string{kind})
		must(err)
		_, isClassic := listed[name+"-classic"]
		_, isNew := listed[name+"-new"]
		fmt.Println("groups", kind, isClassic, isNew)
	}
	listed, err := admin.ListTransactionsByTxPattern(ctx, nil, nil, name+"-.*")
	must(err)
	fmt.Println("transactions", len(listed))

	group := name + "-share"
	var starts kadm.Offsets
	for number := range int32(3) {
		starts.AddOffset(name+"-in", number, 0, -1)
	}
	_, err = admin.AlterShareGroupOffsets(ctx, group, starts)
	must(err)
	sharer := client(kgo.ShareGroup(group), kgo.ConsumeTopics(name+"-in"))
	accepted, released := map[string]bool{}, map[string]bool{}
	for len(accepted) < records {
		fetched := sharer.PollFetches(ctx)
		must(fetched.Err())
		fetched.EachRecord(func(one *kgo.Record) {
			if text := string(one.Value); len(text) == 1 && !released[text] {
				released[text] = true
				one.Ack(kgo.AckRelease)
			} else {
				accepted[text] = true
				one.Ack(kgo.AckAccept)
			}
		})
		must(sharer.FlushAcks(ctx))
	}
	sharer.Close()
	left, err := admin.DescribeShareGroupOffsets(ctx, group)
	must(err)
	var lag int64
	for _, partitions := range left[group].Offsets {
		for _, one := range partitions {
			lag += one.Lag
		}
	}
	fmt.Println("shared", len(accepted), "released", len(released), "lag", lag)
}
